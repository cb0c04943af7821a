"""The draft's own table of KV slots when it sees only the latest tokens (`--speculative-draft-window-size`)."""

from __future__ import annotations

import torch

from sglang_dflash import ops
from sglang_dflash.core.block import Block


class DraftWindow:
    """Each row holds the slots of a request's latest tokens, then of its block. Positions stay absolute."""

    def __init__(self, size: int, page_size: int, target_table: torch.Tensor, draft_table: torch.Tensor) -> None:
        """
        Args:
            size: tokens that the draft sees before the block. It may see up to `page_size` - 1 more, because backends
                read whole pages.
            target_table, draft_table: [R, C] int32; slot of each position of each request row.
        """
        self._size = size
        self._page_size = page_size
        self._target_table = target_table
        self._draft_table = draft_table

    @property
    def max_len(self) -> int:
        return self._size + self._page_size - 1

    def lay_out(self, block: Block) -> torch.Tensor:
        """Fills the draft's table for one step.

        Returns:
            [B] int64: number of tokens before the block that the draft sees.
        """
        width, rows = min(self.max_len + block.width, self._draft_table.shape[1]), block.req_pool_indices
        starts, slots = ops.recent_slots(
            self._target_table, rows, block.prefix_lens, self._size, self._page_size, width
        )
        self._draft_table[rows.long(), :width] = slots
        return block.prefix_lens - starts

"""The values that the stages of a decode step pass on: the drafted block and the plan of the rows to verify."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Block:
    """The rows the draft fills: `[bonus, MASK x (K-1)]` per request.

    Fields:
        ids, positions, slots: [B, K] int64. Here K is the rows of this step: with adaptive widths it may be less than
            the block size that the draft was trained for.
        prefix_lens: [B] int64; committed tokens whose KV exists, the bonus not counted.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    prefix_lens: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """The rows that the target verifies. They form a chain: the anchor, then the drafts.

    Fields:
        ids, positions, slots: [B, W] int64, W <= K.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @property
    def width(self) -> int:
        return self.ids.shape[1]


def plan_chain(block: Block, draft_ids: torch.Tensor, width: int) -> VerifyPlan:
    """Plans the first `width` rows of every block: its anchor and `width - 1` drafts.

    Args:
        draft_ids: [B, K-1] int64; the draft's proposal for positions 1..K-1 of the block.
        width: W, 1..K.
    """
    assert 1 <= width <= block.block_size, (width, block.block_size)
    ids = torch.cat((block.ids[:, :1], draft_ids[:, : width - 1]), dim=1)
    return VerifyPlan(ids, block.positions[:, :width], block.slots[:, :width])

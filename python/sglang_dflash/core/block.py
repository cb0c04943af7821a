"""What a decode step passes from box to box: the block, the proposal, the plan of what is verified."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Block:
    """The rows the draft fills: `[bonus, MASK x (K-1)]` per request.

    Fields:
        ids, positions, slots: [B, K] int64.
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
    """The rows the target sees: a chain, the anchor and then the drafts.

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
    """Verifies the first `width` rows of every block.

    Args:
        draft_ids: [B, K-1] int64; the draft's proposal for positions 1..K-1 of the block.
        width: W, 1..K.
    """
    assert 1 <= width <= block.block_size, (width, block.block_size)
    ids = torch.cat((block.ids[:, :1], draft_ids[:, : width - 1]), dim=1)
    return VerifyPlan(ids, block.positions[:, :width], block.slots[:, :width])

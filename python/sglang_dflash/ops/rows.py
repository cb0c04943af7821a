"""Which rows of the drafted blocks the target verifies: of each block the first ones.

The bodies are plain torch on any device. No shape depends on a value, so nothing here waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Rows(NamedTuple):
    """The verified rows of B blocks of W rows, block by block.

    Fields:
        lens: [B] int32; verified rows of each block, 1 to W.
        kept: [T] int64; of each verified row its place in the flat blocks ([B * W]).
        row_of: [B, W] int64; of each place of a block its verified row; of a place that is not verified, its anchor's.
        size: rows of the target's forward, T or more: graphs have fixed sizes.
    """

    lens: torch.Tensor
    kept: torch.Tensor
    row_of: torch.Tensor
    size: int

    def padded(self) -> torch.Tensor:
        """[size] int64: `kept`, then -1."""
        return F.pad(self.kept, (0, self.size - len(self.kept)), value=-1)


def keep_rows(lens: torch.Tensor, width: int, count: int, size: int | None = None) -> Rows:
    """The first `lens` rows of each block.

    Args:
        lens: [B] int64, each 1 to `width`.
        width: W.
        count: T, the sum of `lens`.
        size: see `Rows`; None: T.
    """
    starts = lens.cumsum(0) - lens
    blocks = torch.arange(len(lens), device=lens.device)
    block = blocks.repeat_interleave(lens, output_size=count)
    kept = torch.arange(count, device=lens.device) + (block * width - starts[block])
    offsets = torch.arange(width, device=lens.device).expand(len(lens), -1)
    offsets = torch.where(offsets < lens[:, None], offsets, 0)
    return Rows(lens.int(), kept, starts[:, None] + offsets, count if size is None else size)


def likeliest_rows(survival: torch.Tensor, count: int, size: int) -> Rows:
    """Every anchor, and the rows with the best chances of all blocks.

    Ties: the shallower row first, then the earlier request.

    Args:
        survival: [B, W - 1] float32; see `survival`.
        count: T, B to B * W.
        size: see `Rows`.
    """
    batch, depths = survival.shape
    order = survival.t().flatten().sort(descending=True, stable=True).indices  # depth by depth: a chain stays whole
    taken = order[: count - batch] % batch
    lens = torch.ones(batch, dtype=torch.int64, device=survival.device)
    return keep_rows(lens.index_add(0, taken, torch.ones_like(taken)), depths + 1, count, size)


def survival(log_probs: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The chance of each draft that it and all before it are accepted, [B, D] float32; it never rises along a chain.

    Args:
        log_probs: [B, D] float32; the draft's, of each draft given those before it. NaN counts as no chance.
        offsets: [B, D] float32; added to the log-odds. They say how wrong the draft's own chances were so far.
    """
    probs = log_probs.exp().nan_to_num(0.0).clamp(1e-6, 1 - 1e-6)
    return (probs.logit() + offsets).sigmoid().cumprod(1)

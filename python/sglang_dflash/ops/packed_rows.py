"""Chains of different lengths, packed for one forward whose number of rows is known: the likeliest rows of all blocks.

The bodies are plain torch on any device. No shape depends on a value, so nothing here waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class PackedRows(NamedTuple):
    """Which rows of B blocks of K rows are verified: of each block the first ones, its anchor included.

    Fields:
        lens: [B] int32; rows of each block, 1 to K.
        places: [T] int64; of each packed row its place in the flat blocks ([B * K]), block by block. None: the forward
            gets the flat blocks as they are.
        rows: [B * K] int64; of each place its packed row; of a place that is not verified, the last row of its block.
            None as `places`.
        size: rows of the forward, T or more.
    """

    lens: torch.Tensor
    places: torch.Tensor | None
    rows: torch.Tensor | None
    size: int

    def padded(self) -> torch.Tensor | None:
        """[size] int64: the places, then -1."""
        if self.places is None:
            return None
        return F.pad(self.places, (0, self.size - len(self.places)), value=-1)


def whole_blocks(batch: int, block_size: int, size: int, device: torch.device | str) -> PackedRows:
    """All rows of every block."""
    lens = torch.full((batch,), block_size, dtype=torch.int64, device=device)
    if size == batch * block_size:
        return PackedRows(lens.int(), None, None, size)
    return pack_rows(lens, block_size, batch * block_size, size)


class ChanceTotals(NamedTuple):
    """What verified rows promised and gave, by depth from 1: decaying sums, from which chances are corrected.

    Fields:
        promised: [K - 1] float32; probabilities of the draft, of rows whose chain was right up to them.
        accepted: [K - 1] float32; how many of these rows were accepted.
    """

    promised: torch.Tensor
    accepted: torch.Tensor


def chain_reach(log_probs: torch.Tensor, totals: ChanceTotals, prior: float) -> torch.Tensor:
    """The chance of each row that its whole chain is right, [B, D] float32; it never rises along a chain.

    A depth's probabilities are multiplied by what its rows gave for what they promised.

    Args:
        log_probs: [B, D] float32; of each draft, given the drafts before it.
        prior: rows. Weight of the guess that the draft's probabilities are right.
    """
    ratio = (totals.accepted + prior) / (totals.promised + prior)
    chances = (log_probs.exp() * ratio).clamp(max=1.0)
    return chances.cumprod(1).cummin(1).values


def likeliest_rows(reach: torch.Tensor, count: int, size: int) -> PackedRows:
    """Every anchor, and the rows with the best chances of all blocks.

    Ties: the shallower row first, then the earlier request.

    Args:
        reach: [B, K - 1] float32; never rises along a chain.
        count: T, B to B * K.
        size: see `PackedRows`.
    """
    batch, depths = reach.shape
    order = reach.t().flatten().sort(descending=True, stable=True).indices  # depth by depth: parents first
    lens = torch.ones(batch, dtype=torch.int64, device=reach.device)
    taken = order[: count - batch] % batch
    lens = lens.index_add(0, taken, torch.ones_like(taken))
    return pack_rows(lens, depths + 1, count, size)


def pack_rows(lens: torch.Tensor, block_size: int, count: int, size: int) -> PackedRows:
    """The first rows of each block. lens: [B] int64, whose sum is `count`."""
    starts = lens.cumsum(0) - lens
    blocks = torch.arange(len(lens), device=lens.device)
    block = blocks.repeat_interleave(lens, output_size=count)
    places = torch.arange(count, device=lens.device) + (block * block_size - starts[block])
    offsets = torch.arange(block_size, device=lens.device).minimum(lens[:, None] - 1)
    return PackedRows(lens.int(), places, (starts[:, None] + offsets).flatten(), size)


def at_places(values: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """The rows' values, 0 for padding. values: [B * K]; padded: see `PackedRows.padded`."""
    return torch.where(padded >= 0, values[padded.clamp(min=0)], 0)


def row_gains(reach: torch.Tensor) -> torch.Tensor:
    """[B * (K - 1)] float32: tokens that the best 1, 2, ... rows beside the anchors should add."""
    return reach.flatten().sort(descending=True).values.cumsum(0)


def learn_chances(
    totals: ChanceTotals, log_probs: torch.Tensor, lens: torch.Tensor, commit_lens: torch.Tensor, kept: float
) -> None:
    """Adds a step's rows to the totals, in place.

    Args:
        log_probs: [B, D] float32.
        lens: [B] int32; rows that were verified.
        commit_lens: [B] int32; accepted drafts and one.
        kept: share of the totals so far that stays.
    """
    depth = torch.arange(1, log_probs.shape[1] + 1, device=log_probs.device)
    reached = (depth < lens[:, None]) & (depth <= commit_lens[:, None])
    accepted = reached & (depth < commit_lens[:, None])
    totals.promised.mul_(kept).add_(torch.where(reached, log_probs.exp(), 0.0).sum(0))
    totals.accepted.mul_(kept).add_(accepted.sum(0))

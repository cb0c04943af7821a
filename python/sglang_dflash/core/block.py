"""The values that the stages of a decode step pass on: the drafted block and the rows to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
import torch.nn.functional as F

from sglang_dflash import ops

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """The rows that a step may verify: `[bonus, MASK x (W-1)]` for each request. The draft fills the masks.

    Fields:
        ids, positions, slots: [B, W] int64.
        prefix_lens: [B] int64; committed tokens whose KV exists, the bonus not counted.
        req_pool_indices: [B] int64; the requests' rows in the slot table.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    prefix_lens: torch.Tensor
    req_pool_indices: torch.Tensor

    @property
    def width(self) -> int:
        """W."""
        return self.ids.shape[1]

    def first(self, rows: int) -> Block:
        """The first rows of each block."""
        ids, positions, slots = (values[:, :rows].contiguous() for values in (self.ids, self.positions, self.slots))
        return Block(ids, positions, slots, self.prefix_lens, self.req_pool_indices)

    def of(self, requests: torch.Tensor) -> Block:
        """The blocks of some requests ([b] int64)."""
        return Block(*(getattr(self, name)[requests] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """The rows that the target verifies, request by request: of each request's block the first ones.

    Fields:
        ids, positions, slots: [T] int64.
        width: W, rows of a block.
        rows: which rows of the B blocks they are; None: all, so T is B * W.
        parents: [B, W] int64; the row behind which each row stands, of trees of W rows; None: each row stands behind
            the row before it.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    width: int
    rows: ops.Rows | None = None
    parents: torch.Tensor | None = None

    @classmethod
    def of(cls, block: Block, ids: torch.Tensor, rows: ops.Rows | None = None) -> VerifyPlan:
        """ids: [B, W] int64; anchor first, then the drafts."""
        assert ids.shape == block.ids.shape, (ids.shape, block.ids.shape)
        flat = ids.flatten(), block.positions.flatten(), block.slots.flatten()
        if rows is None:
            return cls(*flat, block.width)
        kept_ids, positions, slots = (values[rows.kept] for values in flat)
        return cls(kept_ids, positions, slots, block.width, rows)

    @property
    def batch(self) -> int:
        return len(self.ids) // self.width if self.rows is None else len(self.rows.lens)

    @property
    def lens(self) -> torch.Tensor | None:
        """[B] int32: rows of each request; None where each has W."""
        return None if self.rows is None else self.rows.lens

    def lens_on_host(self) -> list[int]:
        """Rows of each request. Waits for the device where they are chosen there."""
        return [self.width] * self.batch if self.rows is None else self.rows.lens.tolist()

    def requests(self) -> torch.Tensor:
        """[T] int64: the request of each row."""
        if self.rows is None:
            return _whole(self.batch, self.width, self.ids.device)
        return self.rows.kept // self.width

    def blocks(self, values: torch.Tensor) -> torch.Tensor:
        """[B, W, ...]: the rows' values ([T or more, ...]); of a row that is not verified, the anchor's."""
        if self.rows is None:
            return values[: len(self.ids)].view(self.batch, self.width, *values.shape[1:])
        return values[self.rows.row_of]

    def chains(self) -> torch.Tensor:
        """[B, W] int64: the ids; -1, which no target chooses, where a row is not verified."""
        if self.rows is None:
            return self.ids.view(self.batch, self.width)
        verified = torch.arange(self.width, device=self.ids.device) < self.rows.lens[:, None]
        return torch.where(verified, self.ids[self.rows.row_of], -1)

    def forward_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids, positions and slots of the target's forward: zeros follow, up to its size."""
        more = 0 if self.rows is None else self.rows.size - len(self.ids)
        if not more:
            return self.ids, self.positions, self.slots
        return F.pad(self.ids, (0, more)), F.pad(self.positions, (0, more)), F.pad(self.slots, (0, more))

    def repeat(self, values: torch.Tensor) -> torch.Tensor:
        """[T, ...]: the rows' values, from one for each request ([B, ...])."""
        return values[self.requests()]

    def repeat_list(self, values: Sequence[T]) -> list[T]:
        """`repeat` for a list."""
        return [value for value, count in zip(values, self.lens_on_host(), strict=True) for _ in range(count)]

    def drafts(self) -> list[list[list[int]]]:
        """The drafts up to each row of each request, the row's own last. On the CPU; waits for the ids."""
        chains = self.blocks(self.ids).tolist()
        return [
            [chain[1 : row + 1] for row in range(count)]
            for chain, count in zip(chains, self.lens_on_host(), strict=True)
        ]


@lru_cache(maxsize=64)
def _whole(batch: int, width: int, device: torch.device) -> torch.Tensor:
    """[B * W] int64: the request of each row; shared, so nobody writes to it."""
    return torch.arange(batch, device=device).repeat_interleave(width)

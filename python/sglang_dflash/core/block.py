"""The values that the stages of a decode step pass on: the drafted block and the rows to verify."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from sglang_dflash import ops


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
class VerifyRows:
    """The rows that the target verifies, request by request: of each request's block the first ones.

    Fields:
        ids, positions, slots: [T] int64.
        width: W, rows of a block.
        chosen: which rows of the B blocks they are; None: all, so T is B * W.
        parents: [B, W] int64; the row behind which each row stands, of trees of W rows; None: each row stands behind
            the row before it.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    width: int
    chosen: ops.Rows | None = None
    parents: torch.Tensor | None = None

    @classmethod
    def of(cls, block: Block, ids: torch.Tensor, chosen: ops.Rows | None = None) -> VerifyRows:
        """ids: [B, W] int64; anchor first, then the drafts."""
        assert ids.shape == block.ids.shape, (ids.shape, block.ids.shape)
        flat = ids.flatten(), block.positions.flatten(), block.slots.flatten()
        if chosen is None:
            return cls(*flat, block.width)
        kept_ids, positions, slots = (values[chosen.kept] for values in flat)
        return cls(kept_ids, positions, slots, block.width, chosen)

    @property
    def batch(self) -> int:
        return len(self.ids) // self.width if self.chosen is None else len(self.chosen.lens)

    def requests(self) -> torch.Tensor:
        """[T] int64: the request of each row."""
        if self.chosen is None:
            return _whole(self.batch, self.width, self.ids.device)
        return self.chosen.kept // self.width

    def requests_on_cpu(self) -> list[int]:
        """`requests`. Waits for the device where some rows are chosen there."""
        if self.chosen is None:
            return [request for request in range(self.batch) for _ in range(self.width)]
        return self.requests().tolist()

    def blocks(self, values: torch.Tensor) -> torch.Tensor:
        """[B, W, ...]: the rows' values ([T or more, ...]); of a row that is not verified, the anchor's."""
        if self.chosen is None:
            return values[: len(self.ids)].view(self.batch, self.width, *values.shape[1:])
        return values[self.chosen.row_of]

    def chains(self) -> torch.Tensor:
        """[B, W] int64: the ids; -1, which no target chooses, where a row is not verified."""
        if self.chosen is None:
            return self.ids.view(self.batch, self.width)
        verified = torch.arange(self.width, device=self.ids.device) < self.chosen.lens[:, None]
        return torch.where(verified, self.ids[self.chosen.row_of], -1)

    def forward_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids, positions and slots of the target's forward: zeros follow, up to its size."""
        more = 0 if self.chosen is None else self.chosen.size - len(self.ids)
        if not more:
            return self.ids, self.positions, self.slots
        return F.pad(self.ids, (0, more)), F.pad(self.positions, (0, more)), F.pad(self.slots, (0, more))


@lru_cache(maxsize=64)
def _whole(batch: int, width: int, device: torch.device) -> torch.Tensor:
    """[B * W] int64: the request of each row; shared, so nobody writes to it."""
    return torch.arange(batch, device=device).repeat_interleave(width)

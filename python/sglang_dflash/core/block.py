"""The values that the stages of a decode step pass on: the drafted block and the rows to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from sglang_dflash import ops

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """The rows that the draft fills in a step: `[bonus, MASK x (D-1)]` for each drafted request.

    D is K, the block size, with whole blocks. A planned step may fill fewer: 2 <= D <= K, and blocks of some requests
    only. How many rows the target then sees is another number, W (`VerifyPlan.verify_width`).

    Fields:
        ids, positions, slots: [B, D] int64.
        prefix_lens: [B] int64; committed tokens whose KV exists, the bonus not counted.
        req_pool_indices: [B] int64; the requests' rows in the slot table.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    prefix_lens: torch.Tensor
    req_pool_indices: torch.Tensor

    @property
    def drafted_width(self) -> int:
        """D."""
        return self.ids.shape[1]


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """The rows that the target verifies, request by request.

    Fields:
        ids, positions, slots: [T] int64.
        verify_width: W, rows of each request that the target sees; with trees, those of the request with the most.
        trees: how the rows hang together; None: each request has a chain of W rows.
        attention_mask: [C] bool; of trees that all have W rows, as the host's attention takes it. None: the
            attention reads `trees`.
        packed: of chains, the rows that the target's forward gets; None: all.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    verify_width: int
    trees: ops.PlannedRows | None = None
    attention_mask: torch.Tensor | None = None
    packed: ops.PackedRows | None = None

    @property
    def batch(self) -> int:
        return len(self.ids) // self.verify_width if self.trees is None else len(self.trees.row_starts) - 1

    @property
    def lens(self) -> list[int]:
        """Rows of each request."""
        return [self.verify_width] * self.batch if self.trees is None else self.trees.lens

    def chains(self) -> torch.Tensor:
        """[B, W] int64: the ids, where each request has a chain."""
        assert self.trees is None
        return self.ids.view(-1, self.verify_width)

    @property
    def places(self) -> torch.Tensor | None:
        """[N] int64: which rows the target's forward gets; None: all, as they are."""
        return None if self.packed is None else self.packed.places

    @property
    def row_in_forward(self) -> torch.Tensor | None:
        """[B, W] int64: of each row of a chain, its row in the target's forward; None if they are the same."""
        if self.packed is None or self.packed.rows is None:
            return None
        return self.packed.rows.view(-1, self.verify_width)

    def compared(self) -> torch.Tensor:
        """[B, W] int64: `chains`, with -1, which no target chooses, where the target did not see a row."""
        if self.packed is None or self.packed.places is None:
            return self.chains()
        seen = torch.arange(self.verify_width, device=self.ids.device) < self.packed.lens[:, None]
        return torch.where(seen, self.chains(), -1)

    def seen(self, values: torch.Tensor) -> torch.Tensor:
        """Of the rows' values ([T, ...]), those of rows that the target's forward gets."""
        return values if self.places is None else values[self.places]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """The rows' values, [T, ...], from those of the target's forward; unseen rows get another row's."""
        rows = self.row_in_forward
        return values if rows is None else values[rows.flatten()]

    def forward_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids, positions and slots of the target's forward: `seen`, then zeros up to its size."""
        padded = None if self.packed is None else self.packed.padded()
        if padded is None:
            return self.ids, self.positions, self.slots
        ids, positions, slots = (ops.at_places(values, padded) for values in (self.ids, self.positions, self.slots))
        return ids, positions, slots

    @property
    def seen_lens(self) -> torch.Tensor | None:
        """[B] int32: rows of each request that the target sees; None where each has W."""
        if self.packed is not None:
            return self.packed.lens
        return None if self.trees is None else self.trees.counts

    def repeat(self, values: torch.Tensor) -> torch.Tensor:
        """[T, ...]: the rows' values, from one for each request ([B, ...])."""
        if self.trees is None:
            return values.repeat_interleave(self.verify_width, 0)
        return values[self.trees.requests]

    def repeat_list(self, values: Sequence[T]) -> list[T]:
        """`repeat` for a list."""
        return [value for value, count in zip(values, self.lens, strict=True) for _ in range(count)]

    def drafts(self) -> list[list[list[int]]]:
        """The drafts on the path to each row of each request, the row's own last. On the CPU; waits for the ids."""
        if self.trees is None:
            return [[chain[1 : row + 1] for row in range(self.verify_width)] for chain in self.chains().tolist()]
        ids, parents = self.ids.tolist(), self.trees.parents.tolist()
        paths = []
        for first, end in pairwise(self.trees.row_starts.tolist()):
            own: list[list[int]] = []
            for row in range(first, end):
                own.append([*own[parents[row]], ids[row]] if parents[row] >= 0 else [])
            paths.append(own)
        return paths


def plan_chain(block: Block, draft_ids: torch.Tensor) -> VerifyPlan:
    """Plans all rows of every block: its anchor and its drafts, so W is D.

    draft_ids: [B, D-1] int64; the draft's proposal for positions 1..D-1 of the block.
    """
    assert draft_ids.shape[1] == block.drafted_width - 1, (draft_ids.shape, block.ids.shape)
    ids = torch.cat((block.ids[:, :1], draft_ids), dim=1)
    return VerifyPlan(ids.flatten(), block.positions.flatten(), block.slots.flatten(), block.drafted_width)

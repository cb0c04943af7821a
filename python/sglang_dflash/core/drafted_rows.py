"""Chooses which rows of drafted requests are verified, and learns from what came of them.

A draft's probabilities run hot or cold: it was trained on other text, and a target that samples at a high temperature
takes its favourite less often. Platt scaling makes chances of them: `ops.platt_scaling` has the formula, `ops.planning`
what its parameters learn.

Several steps are learned together. That costs little more than one: the code of learning has to come into the
processor's caches, which the model's weights have filled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_dflash import ops
from sglang_dflash.core.draft_memory import MemoryTuning
from sglang_dflash.core.places import Places
from sglang_dflash.core.plan_counts import DepthCounts, PlanCounts
from sglang_dflash.core.policy import Copied, chains_of


class DraftedRows:
    def __init__(
        self,
        tables: ops.PlanTables,
        places: Places,
        counts: PlanCounts,
        tuning: ops.PlattTuning | None = None,
        memory: MemoryTuning | None = None,
    ) -> None:
        """
        Args:
            places: of the requests in the tables. A request has one from the first time that it is learned.
            counts: those of blocks rise when steps are learned.
        """
        self._tables, self._places, self._counts = tables, places, counts
        self._tuning, self._memory = tuning or ops.PlattTuning(), memory or MemoryTuning()
        self._kernels = ops.choose_kernels("cpu").plans
        self._planned: Sequence[str] = []  # the requests whose rows were planned last
        self._planned_at = 0  # their first block
        self._steps: list[tuple[Sequence[str], torch.Tensor]] = []  # drafted requests and path, to be learned
        self._blocks, self._most_blocks = 0, len(tables.blocks)  # of these steps, and the most that wait

    def make_room(self, blocks: int) -> None:
        """For the next step's drafted requests. It learns what waits if the table is full."""
        if self._blocks + blocks <= self._most_blocks:
            return
        self.learn()
        if blocks > self._most_blocks:
            self._most_blocks = blocks
            table = self._tables.blocks
            self._tables = self._tables._replace(blocks=table.new_zeros(blocks, table.shape[1]))

    def plan(
        self,
        log_probs: torch.Tensor,
        names: Sequence[str],
        drafted: Sequence[int],
        batch: int,
        least: float,
        copies: Sequence[Copied] = (),
    ) -> ops.PlannedRows:
        """The rows that pay at a price of `least` (`planning.rows_that_pay`), and the chains of the copies.

        Args:
            log_probs: [b, D, k] float32; of the draft, falling in the last dimension.
            names: of the b drafted requests; held until they are learned.
            drafted: these requests among all `batch`.
        """
        assert self._blocks + len(names) <= self._most_blocks, (self._blocks, len(names))
        self._planned, self._planned_at = names, self._blocks
        places = self._places.of(names)
        arguments = (log_probs, self._tables, self._blocks, places, self._tuning.max_logit, least, drafted, batch)
        return self._kernels.plan_rows(*arguments, *(chains_of(copies) if copies else ()))

    def end(self, path: torch.Tensor) -> None:
        """The rows planned last were verified. path: [B, L] int64; see `ops.TreeAcceptance`."""
        assert self._planned_at == self._blocks, "learned between plan and end"
        self._steps.append((self._planned, path))
        self._blocks += len(self._planned)

    def learn(self) -> None:
        """Takes in the steps since the last call."""
        if not self._steps:
            return
        places: list[list[int]] = []
        new: list[int] = []
        before: Sequence[str] | None = None
        for names, _ in self._steps:
            places.append(places[-1] if names == before else [self._place(name, new) for name in names])
            before = names
        paths = [path for _, path in self._steps]
        memory = self._memory
        learned = self._kernels.learn_steps(
            self._tables, places, paths, self._tuning, memory.deep_weight, memory.own_share, new
        )
        self._counts.add_blocks(self._blocks, *learned)
        self._steps.clear()
        self._blocks = 0

    def settle(self) -> None:
        """Learns, and brings the counts by depth up to date."""
        self.learn()
        self._counts.by_depth = _counted(self._tables.by_depth)

    def take_out(self, name: str) -> list[DepthCounts]:
        """Learns, and returns the verified rows of a request by depth, from 1. Its counts begin anew."""
        self.learn()
        place = self._places.get(name)
        if place is None:
            return []
        own = self._tables.own_by_depth[place]
        counted = _counted(own)
        own.zero_()
        return counted

    def _place(self, name: str, new: list[int]) -> int:
        """Adds the place to `new` if it is new to the name."""
        place, is_new = self._places.use(name)
        if is_new:
            new.append(place)
        return place


def _counted(by_depth: torch.Tensor) -> list[DepthCounts]:
    """Of the depths that have rows. They have no gaps: with a row, its ancestors are verified."""
    return [DepthCounts(int(rows), promised, int(held)) for rows, promised, held in by_depth.tolist() if rows]

"""A policy of planned steps that drafts random requests, plays random trees, and copies at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from stand_in_worker import BLOCK

from sglang_dflash import ops
from sglang_dflash.core.plan_counts import PlanCounts
from sglang_dflash.core.policy import Copied, Drafting, chains_of, undrafted

KERNELS = ops.choose_kernels("cpu", torch.float32)


class Playing:
    """A `Policy`. Its trees prefer the right tokens, so that paths become long.

    Args:
        candidates: of a draft row; 1: chains.
        right_ranks: of each request, by depth, the rank of the right token; filled anew by each draft.
        copy: tokens that a request of this name may copy.
    """

    copying = None

    def __init__(
        self,
        rng: random.Random,
        candidates: int,
        right_ranks: dict[str, list[int]],
        copy: Callable[[str], list[int]],
    ) -> None:
        self._copy = copy
        self._rng, self._candidates, self._right_ranks = rng, candidates, right_ranks
        self.ended: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.interrupts = list[int]()  # rows of the prompts
        self.begun: list[tuple[float, bool]] = []  # turn_s and goes_on of each step
        self.counts = PlanCounts()

    def begin(self, requests: Sequence[str], turn_s: float = 0.0, goes_on: bool = False) -> Drafting:
        self._requests = list(requests)
        self.begun.append((turn_s, goes_on))
        everyone, share = list(range(len(requests))), self._rng.random()
        if share < 0.2:
            self.drafting = Drafting(1, [])
        else:
            some = sorted(self._rng.sample(everyone, self._rng.randint(1, len(everyone))))
            self.drafting = Drafting(self._rng.randint(2, BLOCK), some if share < 0.5 else everyone)
        left = [place for place in everyone if place not in self.drafting.requests and self._rng.random() < 0.7]
        copies = tuple(Copied(place, self._copy(self._requests[place])) for place in left)
        self.drafting = Drafting(self.drafting.width, self.drafting.requests, copies)
        return self.drafting

    def draft_begins(self) -> None:
        assert self.drafting.width > 1

    def choose(self, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        if self.drafting.width == 1:
            assert log_probs is None
            self.trees = undrafted(len(self._requests), self.drafting.copies)
            return self.trees
        count = self._candidates
        assert log_probs.shape == (len(self.drafting.requests), self.drafting.width - 1, count)
        assert (log_probs.diff(dim=-1) <= 0).all()
        grown = [self._grow(self._requests[place]) for place in self.drafting.requests]
        parents, depths, ranks = (torch.tensor(rows, dtype=torch.int32) for rows in zip(*grown, strict=True))
        lens = [int((own >= 0).sum()) + 1 for own in ranks]
        trees = ops.Trees(parents, depths, ranks, torch.zeros(depths.shape))
        plan = self.drafting.requests, lens, len(self._requests), *chains_of(self.drafting.copies)
        self.trees = KERNELS.plans.take_rows(trees, *plan)
        return self.trees

    def _grow(self, name: str) -> tuple[list[int], list[int], list[int]]:
        """Parents, depths and ranks of at most BLOCK rows, in any order in which parents come first."""
        rng, right = self._rng, self._right_ranks[name]
        rows = [(-1, 0, -1)]
        truth, chain = 0, self._candidates == 1 or rng.random() < 0.2
        for _ in range(rng.randrange(BLOCK)):
            parent = len(rows) - 1 if chain else rng.randrange(len(rows))
            rank = rng.randrange(self._candidates)
            if rng.random() < 0.6 and (not chain or truth == parent):
                parent = truth
                rank = right[rows[truth][1]] if rows[truth][1] < len(right) else rank
            depth = rows[parent][1] + 1
            if depth >= self.drafting.width or (parent, depth, rank) in rows:
                continue
            rows.append((parent, depth, rank))
            if parent == truth and rank == right[depth - 1]:
                truth = len(rows) - 1
        rows += [(-1, 0, -1)] * (BLOCK - len(rows))
        return tuple(list(column) for column in zip(*rows, strict=True))

    def end(self, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        self.ended.append((path, commit_lens))

    def interrupt(self, rows: int) -> None:
        self.interrupts.append(rows)

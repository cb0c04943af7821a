"""What a worker asks about its rows, step by step, and the simplest answer: always the same number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from sglang_dflash import ops
from sglang_dflash.core.plan_counts import PlanCounts


@dataclass(frozen=True, slots=True)
class Drafting:
    """What the draft fills in one step.

    Fields:
        width: rows of a block, anchor included; 1: the draft does not run.
        requests: indices of the requests that get a block, rising.
    """

    width: int
    requests: list[int]


NOTHING = Drafting(1, [])


class Policy(Protocol):
    """Asked once per decode step; all calls come from the scheduler's thread."""

    counts: PlanCounts
    """Of all steps so far."""

    def begin(self, requests: Sequence[str]) -> Drafting:
        """A decode step begins. requests: their names."""
        ...

    def draft_begins(self) -> None:
        """The draft runs from now on. What came since `begin` is no part of its time."""
        ...

    def choose(self, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        """The draft has run. log_probs: [drafted requests, D, k] float32; None if the draft did not run."""
        ...

    def end(self, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        """The step is over. path, commit_lens: see `ops.TreeAcceptance`."""
        ...

    def interrupt(self) -> None:
        """Something other than a decode step runs."""
        ...


class Fixed:
    """The same number of rows for every request and step, as chains: what a plan is compared with."""

    def __init__(self, rows: int) -> None:
        """rows: of one request, anchor included; 1: the draft never runs."""
        self._rows, self._batch, self._begun_s = rows, 0, 0.0
        self.counts = PlanCounts()

    def begin(self, requests: Sequence[str]) -> Drafting:
        self._batch, self._begun_s = len(requests), time.perf_counter()
        return NOTHING if self._rows == 1 else Drafting(self._rows, list(range(self._batch)))

    def draft_begins(self) -> None:
        pass

    def choose(self, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        if log_probs is None:
            return anchors(self._batch)
        first = log_probs[:, :, :1]
        lens = [self._rows] * self._batch
        chains = ops.best_first(torch.ones_like(first), self._rows)  # all rows, however unlikely
        promised = float(first[:, : self._rows - 1, 0].cumsum(1).exp().sum())
        self.counts.chose(lens, self._batch * (self._rows - 1), promised)
        return ops.take_rows(chains, list(range(self._batch)), lens, self._batch)

    def end(self, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        self.counts.steps += 1
        if self._rows > 1:
            self.counts.accepted += int(commit_lens.sum()) - self._batch
        self.counts.seconds += time.perf_counter() - self._begun_s

    def interrupt(self) -> None:
        pass


@lru_cache(maxsize=256)
def anchors(batch: int) -> ops.PlannedRows:
    """A plan of one row for each request. Its tensors are shared; nobody writes to them."""
    none = torch.empty((0, 1), dtype=torch.int32)
    return ops.take_rows(ops.Trees(none, none, none, none), [], [], batch)

"""What a worker asks about its rows, step by step, and the simplest answer: always the same number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from sglang_dflash import ops
from sglang_dflash.core.copying import Copying
from sglang_dflash.core.plan_counts import DepthCounts, PlanCounts


class Copied(NamedTuple):
    """A request that is not drafted: it gets a chain of copied tokens.

    Fields:
        request: its index.
        ids: the tokens, at least one; all of them are verified.
    """

    request: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Drafting:
    """What is proposed in one step. Whoever knows this and the draft's candidates knows all ids of the planned rows.

    Fields:
        width: D, rows of a block, anchor included; 1: the draft does not run.
        requests: indices of the requests that get a block, rising.
        copies: for other requests, rising.
    """

    width: int
    requests: list[int]
    copies: tuple[Copied, ...] = ()

    def candidates(self, draft_ids: torch.Tensor | None) -> tuple[list[int], torch.Tensor]:
        """The requests with proposed rows, rising, and their candidates.

        Args:
            draft_ids: [b, D, k] int64; None if the draft did not run.

        Returns:
            [n, D', k'] int64; a copied token is the first of its depth.
        """
        if draft_ids is None:
            draft_ids = torch.empty(0, 0, 1 if self.copies else 0, dtype=torch.int64)
        if not self.copies:
            return self.requests, draft_ids
        everyone = sorted((*self.requests, *(copied.request for copied in self.copies)))
        place_of = {request: place for place, request in enumerate(everyone)}
        drafted, depths, candidates = draft_ids.shape
        most = max(depths, *(len(copied.ids) for copied in self.copies))
        ids = torch.zeros(len(everyone), most, candidates, dtype=torch.int64)
        if drafted:
            ids[[place_of[request] for request in self.requests], :depths] = draft_ids
        for copied in self.copies:
            ids[place_of[copied.request], : len(copied.ids), 0] = torch.tensor(copied.ids)
        return everyone, ids


NOTHING = Drafting(1, [])


class Policy(Protocol):
    """Asked once per decode step; all calls come from the scheduler's thread."""

    counts: PlanCounts
    """Of all steps so far."""
    copying: Copying | None
    """What it copies from, shown each step's texts before `begin`; None: it copies nothing."""

    def begin(self, requests: Sequence[str], turn_s: float = 0.0, goes_on: bool = False) -> Drafting:
        """A decode step begins.

        Args:
            requests: their names.
            turn_s: how long the scheduler's turn may last if it takes several steps; 0: it is this step alone.
            goes_on: whether the step before was of the same turn.
        """
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

    def interrupt(self, rows: int) -> None:
        """Something other than a decode step runs. rows: of prompts, if it is a prefill of nothing else; else 0."""
        ...

    def settle(self) -> None:
        """Brings `counts` up to date, for a reader who needs the latest steps."""
        ...

    def request_ends(self, request: str) -> list[DepthCounts]:
        """Its verified rows by depth, from 1; empty if they are not known. Counting begins anew, as another request
        may get the same name."""
        ...


class Fixed:
    """The same number of rows for every request and step, as chains: what a plan is compared with."""

    def __init__(self, rows: int) -> None:
        """rows: of one request, anchor included; 1: the draft never runs."""
        self._rows, self._batch, self._begun_s = rows, 0, 0.0
        self._kernels = ops.choose_kernels("cpu").plans
        self.counts = PlanCounts()
        self.copying: Copying | None = None

    def begin(self, requests: Sequence[str], turn_s: float = 0.0, goes_on: bool = False) -> Drafting:
        self._batch, self._begun_s = len(requests), time.perf_counter()
        return NOTHING if self._rows == 1 else Drafting(self._rows, list(range(self._batch)))

    def draft_begins(self) -> None:
        pass

    def choose(self, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        if log_probs is None:
            return anchors(self._batch)
        first = log_probs[:, :, :1]
        lens = [self._rows] * self._batch
        chains = self._kernels.best_first(torch.ones_like(first), self._rows)  # all rows, however unlikely
        rows = self._batch * (self._rows - 1)
        promised = float(first[:, : self._rows - 1, 0].cumsum(1).exp().sum())
        self.counts.add_blocks(self._batch, rows, rows, promised, 0)
        return self._kernels.take_rows(chains, list(range(self._batch)), lens, self._batch)

    def end(self, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        self.counts.steps += 1
        if self._rows > 1:
            self.counts.accepted += int(commit_lens.sum()) - self._batch
        self.counts.seconds += time.perf_counter() - self._begun_s

    def interrupt(self, rows: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def request_ends(self, request: str) -> list[DepthCounts]:
        return []


@lru_cache(maxsize=256)
def anchors(batch: int) -> ops.PlannedRows:
    """A plan of one row for each request. Its tensors are shared; nobody writes to them."""
    return _without_trees(batch, [], [])


def undrafted(batch: int, copies: Sequence[Copied] = ()) -> ops.PlannedRows:
    """The rows of a step without a draft: the chains of the copies, and the anchors of all other requests."""
    return _without_trees(batch, *chains_of(copies)) if copies else anchors(batch)


def chains_of(copies: Sequence[Copied]) -> tuple[list[int], list[int]]:
    """`copied` and `copied_lens` of `tree.take_rows`."""
    return [copied.request for copied in copies], [1 + len(copied.ids) for copied in copies]


def _without_trees(batch: int, copied: list[int], copied_lens: list[int]) -> ops.PlannedRows:
    none = torch.empty((0, 1), dtype=torch.int32)
    kernels = ops.choose_kernels("cpu").plans
    return kernels.take_rows(ops.Trees(none, none, none, none), [], [], batch, copied, copied_lens)

"""Under tensor parallelism all ranks follow the first rank's plan: their own would differ, as their clocks do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_dflash import ops
from sglang_dflash.core.plan_counts import DepthCounts, PlanCounts
from sglang_dflash.core.policy import NOTHING, Copied, Drafting, Policy, chains_of, undrafted


class SharedPlan:
    """A `Policy` that asks another one on the first rank alone, and sends its answers to the others.

    All ranks call it with the same requests. A step takes one exchange, or two if anything is drafted.
    """

    def __init__(self, policy: Policy, most_rows: int, group: Any) -> None:
        """
        Args:
            most_rows: of one request, anchor included.
            group: the host's `GroupCoordinator` of the ranks.
        """
        self._policy = policy if group.rank_in_group == 0 else None
        self._most_rows, self._group = most_rows, group
        self._kernels = ops.choose_kernels("cpu").plans
        self.counts = PlanCounts() if self._policy is None else policy.counts
        self.copying = None if self._policy is None else policy.copying
        self._batch, self._drafting = 0, NOTHING

    def begin(self, requests: Sequence[str], turn_s: float = 0.0, goes_on: bool = False) -> Drafting:
        self._batch = len(requests)
        # The width; for each request, whether it is drafted, then the copied ids.
        sent = torch.full((1 + self._batch, 1 + self._most_rows), -1)
        if self._policy is not None:
            drafting = self._policy.begin(requests, turn_s, goes_on)
            sent[0, 0] = drafting.width
            for request in drafting.requests:
                sent[1 + request, 0] = 1
            for copied in drafting.copies:
                sent[1 + copied.request, 1 : 1 + len(copied.ids)] = torch.tensor(copied.ids)
        self._group.broadcast(sent, src=0)
        (width, *_), *rows = sent.tolist()
        drafted = [request for request, row in enumerate(rows) if row[0] == 1]
        copies = [Copied(request, [token for token in row[1:] if token >= 0]) for request, row in enumerate(rows)]
        self._drafting = Drafting(width, drafted, tuple(copied for copied in copies if copied.ids))
        return self._drafting

    def draft_begins(self) -> None:
        if self._policy is not None:
            self._policy.draft_begins()

    def choose(self, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        rows = None if self._policy is None else self._policy.choose(log_probs)
        drafting = self._drafting
        if not drafting.requests:
            return undrafted(self._batch, drafting.copies) if rows is None else rows
        shape = (4, len(drafting.requests), self._most_rows)
        sent = torch.zeros(shape, dtype=torch.int32)  # parents, depths, ranks, count
        if rows is not None:
            fields = torch.stack((rows.parents, rows.depths, rows.ranks))  # [3, T]
            starts = rows.row_starts.tolist()
            for place, request in enumerate(drafting.requests):
                count = sent[3, place, 0] = rows.lens[request]
                sent[:3, place, :count] = fields[:, starts[request] : starts[request + 1]]
        self._group.broadcast(sent, src=0)
        if rows is not None:
            return rows
        parents, depths, ranks, counts = sent
        trees = ops.Trees(parents, depths, ranks, torch.ones(ranks.shape))
        drafted = drafting.requests, counts[:, 0].tolist()
        return self._kernels.take_rows(trees, *drafted, self._batch, *chains_of(drafting.copies))

    def end(self, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        if self._policy is not None:
            self._policy.end(path, commit_lens)

    def interrupt(self, rows: int) -> None:
        if self._policy is not None:
            self._policy.interrupt(rows)

    def settle(self) -> None:
        if self._policy is not None:
            self._policy.settle()

    def request_ends(self, request: str) -> list[DepthCounts]:
        return [] if self._policy is None else self._policy.request_ends(request)

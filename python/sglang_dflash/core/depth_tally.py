"""Counts by depth what a plan verified, what was promised of it, and what was accepted."""

from __future__ import annotations

from itertools import zip_longest

import torch

from sglang_dflash import ops
from sglang_dflash.core.plan_counts import DepthCounts, PlanCounts

TOGETHER = 256
"""Most drafted steps that are counted by depth together: a count of its own for each would cost a share of a step."""


class DepthTally:
    """Takes at most `TOGETHER` drafted steps at a time."""

    def __init__(self, counts: PlanCounts) -> None:
        """counts: whose `by_depth` rises."""
        self._counts = counts
        self._steps: list[tuple[ops.Trees, list[int], torch.Tensor]] = []

    def add(self, trees: ops.Trees, lens: list[int], commit_lens: torch.Tensor) -> None:
        """A drafted step has ended.

        Args:
            trees: of the drafted requests, whose first `lens` rows were verified.
            commit_lens: [n] int32; of these requests, and perhaps of others that commit one token.
        """
        self._steps.append((trees, lens, commit_lens))
        if len(self._steps) == TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Brings `by_depth` up to date."""
        if not self._steps:
            return
        trees, lens, commit_lens = zip(*self._steps, strict=True)
        self._steps.clear()
        depths = torch.cat([one.depths for one in trees])  # [N, R]
        counts = torch.tensor([count for step in lens for count in step])[:, None]
        verified = (torch.arange(depths.shape[1]) < counts) & (depths > 0)
        of_rows = depths[verified]
        rows = of_rows.bincount().tolist()[1:]
        promised = of_rows.bincount(torch.cat([one.reaches for one in trees])[verified].double()).tolist()[1:]
        ends = (torch.cat(commit_lens) - 1).bincount(minlength=len(rows) + 1)  # paths by their last row's depth
        accepted = ends.flip(0).cumsum(0).flip(0).tolist()[1:]
        now = [DepthCounts(*one) for one in zip(rows, promised, accepted, strict=True)]
        before = self._counts.by_depth
        self._counts.by_depth = [a.plus(b) for a, b in zip_longest(before, now, fillvalue=DepthCounts())]

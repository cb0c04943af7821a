"""Estimates the seconds between a decode step and the next one."""

from __future__ import annotations

import math

from sglang_dflash.core.step_times import StepTimes, TimeTuning

OUTLIER_RATIO = 3.0
"""A gap longer than this many times the mean was disturbed, and counts as that long only. A gap as much shorter than
the mean replaces it."""
DECAY_STEPS = 256
"""Steps after which older tokens and ends weigh 1/e."""
PRIOR_ROW_SHARE = 1 / 64
"""Share of a prefill's fixed time that one row of a prompt adds. First guess."""


class TurnGaps:
    """Mean gaps within and between turns of the scheduler, and across prefills.

    A turn is one step, or several short ones: a further step is part of it as long as it should end within `turn_s`.
    What the scheduler does between two turns is shared by a turn's steps. So how much of it falls to a step depends on
    how long the step is.

    A request that ends also ends the turn, and under load another one comes for it, whose prefill has a fixed time.
    Requests that end with the same step share both. So steps that commit many tokens are interrupted less often for
    each token. The time of the prompts' rows is the same for all plans, and is left out.

    Gaps are kept until somebody asks, as in `StepTimes`.
    """

    def __init__(self, weight: float) -> None:
        """weight: share of the latest gap in its mean."""
        self._weight = weight
        self.turn_s = 0.0
        """How long a turn of several steps may last; 0: a turn is one step."""
        self._within_s: float | None = None
        self._between_s: float | None = None
        self._new: list[tuple[float, bool]] = []
        self._prefills = StepTimes(TimeTuning(prior_row_share=PRIOR_ROW_SHARE))
        self._ended = self._tokens = 0.0

    def observe(self, seconds: float, goes_on: bool) -> None:
        """Without a prefill. goes_on: whether the steps before and after are of one turn."""
        self._new.append((seconds, goes_on))

    def observe_prefill(self, rows: int, seconds: float) -> None:
        """rows: of the prompts, as computed; at least one."""
        self._prefills.observe(rows, seconds)

    def step(self, tokens: float, ended: int) -> None:
        """A step was expected to commit `tokens`, and so many requests have ended with it. Not what it has committed: a
        plan that promises too much then finds as much fewer ends for each promised token."""
        kept = 1 - 1 / DECAY_STEPS
        self._tokens = self._tokens * kept + tokens
        self._ended = self._ended * kept + ended

    def _mean(self, mean_s: float | None, latest_s: float) -> float:
        if not mean_s or latest_s < mean_s / OUTLIER_RATIO:  # the gaps before were disturbed
            return latest_s
        return mean_s + self._weight * (min(latest_s, OUTLIER_RATIO * mean_s) - mean_s)

    def after(self, step_s: float, tokens: float) -> float:
        """Expected gap in seconds for each of many steps that take `step_s` and commit `tokens`."""
        for seconds, goes_on in self._new:
            if goes_on:
                self._within_s = self._mean(self._within_s, seconds)
            else:
                self._between_s = self._mean(self._between_s, seconds)
        self._new.clear()
        within_s, between_s = self._within_s or 0.0, self._between_s or 0.0
        fit = self.turn_s / (step_s + within_s)  # whole steps only: half a step is lost on average
        steps = max(1.0, fit - 0.5)
        gap_s = (between_s + within_s * (steps - 1)) / steps
        if not self._tokens or not self._prefills.seen:
            return gap_s
        ends = -math.expm1(-self._ended / self._tokens * tokens)  # chance that a request ends
        # A turn that goes on may be ended, then another request may come for it: both have this chance.
        gap_s += ends * max(0.0, between_s - gap_s)
        return gap_s + ends * max(0.0, self._prefills.line()[0] - gap_s)

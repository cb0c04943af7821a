"""Estimates the seconds between a decode step and the next one."""

from __future__ import annotations

OUTLIER_RATIO = 3.0
"""A gap longer than this many times the mean was disturbed, and counts as that long only. A gap as much shorter than
the mean replaces it."""


class TurnGaps:
    """Mean gaps within and between turns of the scheduler.

    A turn is one step, or several short ones: a further step is part of it as long as it should end within `turn_s`.
    What the scheduler does between two turns is shared by a turn's steps. So how much of it falls to a step depends on
    how long the step is. Turns that end early, for a request that ends or a message, are left out of account. Gaps are
    kept until somebody asks, as in `StepTimes`.
    """

    def __init__(self, weight: float) -> None:
        """weight: share of the latest gap in its mean."""
        self._weight = weight
        self.turn_s = 0.0
        """How long a turn of several steps may last; 0: a turn is one step."""
        self._within_s: float | None = None
        self._between_s: float | None = None
        self._new: list[tuple[float, bool]] = []

    def observe(self, seconds: float, goes_on: bool) -> None:
        """goes_on: whether the steps before and after are of one turn."""
        self._new.append((seconds, goes_on))

    def _mean(self, mean_s: float | None, latest_s: float) -> float:
        if not mean_s or latest_s < mean_s / OUTLIER_RATIO:  # the gaps before were disturbed
            return latest_s
        return mean_s + self._weight * (min(latest_s, OUTLIER_RATIO * mean_s) - mean_s)

    def after(self, step_s: float) -> float:
        """Expected gap in seconds for each of many steps that take `step_s`."""
        for seconds, goes_on in self._new:
            if goes_on:
                self._within_s = self._mean(self._within_s, seconds)
            else:
                self._between_s = self._mean(self._between_s, seconds)
        self._new.clear()
        within_s, between_s = self._within_s or 0.0, self._between_s or 0.0
        fit = self.turn_s / (step_s + within_s)  # whole steps only: half a step is lost on average
        steps = max(1.0, fit - 0.5)
        return (between_s + within_s * (steps - 1)) / steps

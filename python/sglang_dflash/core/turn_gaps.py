"""Estimates the seconds between a decode step and the next one, and what a token must bring beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sglang_dflash.core.step_times import StepTimes, TimeTuning


@dataclass(frozen=True, slots=True)
class GapTuning:
    """Tuning values of `TurnGaps`.

    Fields:
        weight: share. Weight of the latest gap in its mean.
        outlier_ratio: ratio of times. A gap longer than this many times the mean was disturbed, and counts as that long
            only. A gap as much shorter than the mean replaces it.
        decay_steps: steps after which older tokens and ends weigh 1/e.
        prior_row_share: share of a prefill's fixed time that one row of a prompt adds. First guess.
        least_worth: share. A token is worth this share of itself at least, after what it adds to the gap. Where
            prefills take nearly all time, the rest would be next to nothing.
    """

    weight: float = 0.1
    outlier_ratio: float = 3.0
    decay_steps: int = 256
    prior_row_share: float = 1 / 64
    least_worth: float = 0.25


class Gap(NamedTuple):
    """What lies between a decode step and the next one.

    Fields:
        seconds: expected.
        token_s: seconds that a further token of the step adds.
    """

    seconds: float
    token_s: float


class Expected(NamedTuple):
    """What a step should bring.

    Fields:
        tokens: that it commits.
        seconds: with the gap to the next step; 0: nothing is measured yet.
        price: tokens per second that a further row must bring, in its own time, to raise the rate. That is more than
            the rate, because its tokens make the gap longer.
    """

    tokens: float
    seconds: float = 0.0
    price: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


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

    def __init__(self, tuning: GapTuning | None = None) -> None:
        self._tuning = tuning or GapTuning()
        self.turn_s = 0.0
        """How long a turn of several steps may last; 0: a turn is one step."""
        self._within_s: float | None = None
        self._between_s: float | None = None
        self._new: list[tuple[float, bool]] = []
        self._prefills = StepTimes(TimeTuning(prior_row_share=self._tuning.prior_row_share))
        self._ended = self._tokens = 0.0

    def observe(self, seconds: float, goes_on: bool) -> None:
        """Without a prefill. goes_on: whether the steps before and after are of one turn."""
        self._new.append((seconds, goes_on))

    def observe_prefill(self, rows: int, seconds: float) -> None:
        """rows: of the prompts, as computed; at least one."""
        self._prefills.observe(rows, seconds)

    def step(self, tokens: float, ended: int) -> None:
        """A step was expected to commit `tokens`, and so many requests have ended with it. Not what it has committed: a
        plan that promises too much then finds fewer ends for each promised token, in proportion."""
        kept = 1 - 1 / self._tuning.decay_steps
        self._tokens = self._tokens * kept + tokens
        self._ended = self._ended * kept + ended

    def _mean(self, mean_s: float | None, latest_s: float) -> float:
        ratio = self._tuning.outlier_ratio
        if not mean_s or latest_s < mean_s / ratio:  # the gaps before were disturbed
            return latest_s
        return mean_s + self._tuning.weight * (min(latest_s, ratio * mean_s) - mean_s)

    def after(self, step_s: float, tokens: float) -> Gap:
        """The gap after each of many steps that take `step_s` and commit `tokens`."""
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
        if not self._tokens:
            return Gap(gap_s, 0.0)
        each = self._ended / self._tokens  # requests that end for each token
        none = math.exp(-each * tokens)  # chance that no request ends with the step
        # If one ends, the turn ends. If another one comes for it, its prefill lies in the gap. Both have this chance.
        longer_s = max(0.0, between_s - gap_s)
        gap_s += (1 - none) * longer_s
        prefill_s = self._prefills.line()[0] - gap_s if self._prefills.seen else 0.0
        if prefill_s <= 0:
            return Gap(gap_s, each * none * longer_s)
        return Gap(gap_s + (1 - none) * prefill_s, each * none * (prefill_s + none * longer_s))

    def expected(self, step_s: float, tokens: float) -> Expected:
        """Of each of many steps that take `step_s` and commit `tokens`."""
        gap = self.after(step_s, tokens)
        seconds = step_s + gap.seconds
        rate = tokens / seconds
        return Expected(tokens, seconds, rate / max(1 - rate * gap.token_s, self._tuning.least_worth))

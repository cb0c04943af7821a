"""Chooses how many rows the next decode step drafts and verifies: the width with the most tokens per second.

One more row may commit one more token, and it costs time: almost none while reading the weights dominates the step,
its full share once all cores are busy. Both sides are measured while serving, over all requests of the batch:

* `Acceptance` estimates the tokens of a step: an exponentially weighted acceptance rate for each draft position, shrunk
  to the rate of the position before it.
* `StepTimes` estimates the seconds of a step: exponentially weighted ridge regression on the step's rows, with the
  slope shrunk to a first guess.

Width 1 is plain decoding. The choice does not change answers, except where the shape of a batch changes rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class WidthTuning:
    """Tuning values of `AdaptiveWidth`.

    Acceptance:
        tried_decay_trials: trials. After this many new trials of a draft position, its older ones weigh 1/e.
        untried_decay_trials: trials. The same for positions beyond the width, where each request that accepts all
            drafts counts as one trial. As their counts fade, the prior takes over, and they are tried again.
        prior_trials: trials. Weight of the prior of a position's rate, which is the rate of the position before it.

    Step times:
        step_decay_steps: steps. After this many new steps, older ones weigh 1/e.
        prior_row_share: share of a step's fixed time that one row adds. First guess.
        prior_steps: steps. Weight of that guess: it counts as this many steps with half the mean rows.
        prior_plain_share: share of the shortest drafting step's time that a plain step takes. First guess.
        outlier_ratio: ratio of times. A step longer than this ratio times its expected time was disturbed: it counts
            as that long only. After a step shorter by more than this ratio, all steps before it are forgotten.
        gap_weight: share. Weight of the latest gap between two steps in the mean gap.

    Probes, steps at another width than the best:
        probe_time_share: share of step time that probes may cost.
        probe_interval_steps: steps from one probe to the next, at least.
    """

    tried_decay_trials: int = 128
    untried_decay_trials: int = 1024
    prior_trials: float = 4
    step_decay_steps: int = 256
    prior_row_share: float = 1 / 32
    prior_steps: float = 8
    prior_plain_share: float = 0.6
    outlier_ratio: float = 3.0
    gap_weight: float = 0.1
    probe_time_share: float = 0.01
    probe_interval_steps: int = 16


TUNING = WidthTuning()


class WidthPolicy(Protocol):
    """Asked once per decode step; all calls come from the scheduler's thread."""

    adapts: bool  # whether it needs `end`, and SGLang's metrics report its widths

    def begin(self, requests: int) -> int:
        """A decode step begins. Returns its width, 1 to K rows for each of `requests`; 1 drafts nothing."""
        ...

    def end(self, commit_lens: Sequence[int]) -> None:
        """The step is over. `commit_lens` has each request's committed tokens."""
        ...

    def interrupt(self) -> None:
        """Something other than a decode step runs."""
        ...


class FullWidth:
    """Always the whole block."""

    adapts = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def begin(self, requests: int) -> int:
        return self._block_size

    def end(self, commit_lens: Sequence[int]) -> None:
        pass

    def interrupt(self) -> None:
        pass


class AdaptiveWidth:
    """The width with the most expected tokens per second. Now and then it probes another width to measure it."""

    adapts = True

    def __init__(
        self, block_size: int, clock: Callable[[], float] = time.perf_counter, tuning: WidthTuning = TUNING
    ) -> None:
        """
        Args:
            block_size: K, at least 2.
            clock: monotonic, in seconds.
        """
        assert block_size >= 2, block_size
        self._block_size = block_size
        self._clock = clock
        self._tuning = tuning
        self._acceptance = Acceptance(block_size, tuning)
        self._drafting, self._plain = StepTimes(tuning), StepTimes(tuning)
        self._gap_s = 0.0  # mean time between two consecutive decode steps
        self._probes = 0
        self._steps_since_probe = 0
        self._probe_budget_s = 0.0
        self._width = block_size
        self._requests = 0
        self._begun_s = 0.0
        self._ended_s: float | None = None

    def begin(self, requests: int) -> int:
        self._begun_s = self._clock()
        if self._ended_s is not None:
            self._gap_s += self._tuning.gap_weight * (self._begun_s - self._ended_s - self._gap_s)
        self._requests = requests
        self._width = self._choose(requests)
        return self._width

    def end(self, commit_lens: Sequence[int]) -> None:
        assert len(commit_lens) == self._requests, (len(commit_lens), self._requests)
        self._ended_s = self._clock()
        took_s = self._ended_s - self._begun_s
        times = self._drafting if self._width > 1 else self._plain
        times.observe(self._requests * self._width, took_s + min(self._gap_s, took_s))
        self._acceptance.observe(commit_lens, self._width)

    def interrupt(self) -> None:
        self._ended_s = None

    def _choose(self, requests: int) -> int:
        if not self._drafting.seen:
            return self._block_size
        lens = self._acceptance.expected()
        seconds = [self._seconds(requests, width) for width in range(1, self._block_size + 1)]
        rates = [length / took for length, took in zip(lens, seconds, strict=True)]
        best = 1 + max(range(len(rates)), key=rates.__getitem__)
        self._steps_since_probe += 1
        earned_s = self._tuning.probe_time_share * seconds[best - 1]
        self._probe_budget_s = min(self._probe_budget_s + earned_s, max(seconds))
        if self._steps_since_probe < self._tuning.probe_interval_steps:
            return best
        # In turn: twice as wide, because drafts may have become better; half as wide; plain decoding.
        probe = (min(2 * best, self._block_size), max(best // 2, 1), 1)[self._probes % 3]
        # What the probe costs: its time, less the time in which the best width commits the same tokens.
        lost_s = seconds[probe - 1] - lens[probe - 1] / rates[best - 1]
        if lost_s > self._probe_budget_s:
            return best
        self._probe_budget_s -= lost_s
        self._probes += 1
        self._steps_since_probe = 0
        return probe

    def _seconds(self, requests: int, width: int) -> float:
        """Expected time of a step; a drafting step must have been seen."""
        if width > 1:
            return self._drafting.expected(requests * width)
        shortest = self._drafting.expected(requests * 2)  # a plain step takes no longer: it is a part of this one
        if not self._plain.seen:
            return self._tuning.prior_plain_share * shortest
        return min(self._plain.expected(requests), shortest)


class Acceptance:
    """Acceptance rate of each draft position, given that all drafts before it were accepted.

    Trials and acceptances of a position are counted with exponential weights: newer ones count more. The rate is shrunk
    to the rate of the position before it, as if `prior_trials` more trials had been seen at that rate. The first
    position is shrunk to a rate of 1, so a new server drafts whole blocks.
    """

    def __init__(self, block_size: int, tuning: WidthTuning = TUNING) -> None:
        self._tuning = tuning
        self._tried = [0.0] * (block_size - 1)
        self._accepted = [0.0] * (block_size - 1)

    def observe(self, commit_lens: Sequence[int], width: int) -> None:
        """Counts one step of `width` rows; `commit_lens` has each request's committed tokens."""
        tried = len(commit_lens)
        for draft in range(len(self._tried)):
            accepted = sum(length > draft + 1 for length in commit_lens)
            within = draft < width - 1
            decay_trials = self._tuning.tried_decay_trials if within else self._tuning.untried_decay_trials
            kept = (1 - 1 / decay_trials) ** tried
            self._tried[draft] = self._tried[draft] * kept + (tried if within else 0)
            self._accepted[draft] = self._accepted[draft] * kept + accepted
            tried = accepted if within else tried
            if not tried:
                break

    def expected(self) -> list[float]:
        """[K]; the expected commit_len at width 1 to K."""
        prior = self._tuning.prior_trials
        lens, survives, share = [1.0], 1.0, 1.0
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            share = (accepted + prior * share) / (tried + prior)
            survives *= share
            lens.append(lens[-1] + survives)
        return lens


class StepTimes:
    """Seconds of a step as a line over its rows, by exponentially weighted ridge regression.

    Each step makes the weights of all steps before it smaller. The line goes through the weighted means of rows and
    seconds. The ridge term shrinks its slope to a first guess (`prior_row_share`), which is the slope while all steps
    have the same rows. The first step is not counted, because it includes one-time work.
    """

    def __init__(self, tuning: WidthTuning = TUNING) -> None:
        self._tuning = tuning
        self._warm = False
        self._forget()

    def _forget(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    @property
    def seen(self) -> bool:
        return self._weight > 0

    def observe(self, rows: int, seconds: float) -> None:
        assert rows > 0 and seconds > 0, (rows, seconds)
        if not self._warm:
            self._warm = True
            return
        if self.seen:
            expected = self.expected(rows)
            if seconds < expected / self._tuning.outlier_ratio:
                self._forget()
            seconds = min(seconds, self._tuning.outlier_ratio * expected)
        kept = 1 - 1 / self._tuning.step_decay_steps
        self._weight = self._weight * kept + 1
        self._rows = self._rows * kept + rows
        self._seconds = self._seconds * kept + seconds
        self._rows_rows = self._rows_rows * kept + rows * rows
        self._rows_seconds = self._rows_seconds * kept + rows * seconds

    def expected(self, rows: int) -> float:
        """Expected seconds of a step of `rows` rows; at least one step must have been counted."""
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        variation = self._rows_rows - self._rows * mean_rows
        covariation = self._rows_seconds - self._rows * mean_seconds
        ridge = self._tuning.prior_steps * (mean_rows / 2) ** 2  # the variation of `prior_steps` such steps
        guess = mean_seconds / (mean_rows + 1 / self._tuning.prior_row_share)
        slope = (covariation + ridge * guess) / (variation + ridge)
        slope = min(max(slope, 0.0), mean_seconds / mean_rows)  # time never falls with rows, nor below 0
        return mean_seconds + slope * (rows - mean_rows)

"""How many rows the next step drafts and verifies: as many as are worth their time.

A row more may commit a token more, and costs time: next to nothing while the weights are read anyway, its full share
once rows fill the machine. Both sides are measured while serving, over all requests of the batch: how often each draft
is accepted, and what a step of so many rows takes. The step of the most tokens per second wins; of one row, it is plain
decoding. Answers do not depend on it, but for rounding where the shape of a batch rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

TRIALS = 128  # a draft's older trials count less: after as many new ones, 1/e
UNTRIED = 1024  # the same of drafts beyond the width: what was bad long ago may be tried again
STEPS = 256  # a step's older times count less, too
DOUBT = 4  # trials of the draft before it that stand in for those of a draft that was tried little
GUESSED = 8  # steps of half as many rows as usual that the first guess of a row's cost weighs
FREE_ROWS = 32  # that guess: a row takes what 1 of FREE_ROWS does of a step without rows
OPTIMISM = 0.6  # a plain step is thought to take this share of the shortest drafting one until one was seen
OUTLIER = 3.0  # a step that took more than this times what was expected was disturbed, and counts as this
BETWEEN = 0.1  # what the time between the last two steps weighs in its mean
PROBES_SHARE = 0.01  # of the time may go to trying other widths
PROBES_APART = 16  # steps, at least


class WidthPolicy(Protocol):
    """Asked once per decode step; all calls come from the scheduler's thread."""

    adapts: bool  # whether it wants to hear how a step ended, and users which widths it chose

    def begin(self, requests: int) -> int:
        """The width of the step that begins: 1 .. K rows for each of its `requests`; 1 drafts nothing."""
        ...

    def end(self, commit_lens: Sequence[int]) -> None:
        """The step is over, and committed so many tokens of each request."""
        ...

    def interrupt(self) -> None:
        """Something else than a decode step is run."""
        ...


class FullWidth:
    """Whole blocks, always."""

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
    """The width of the most tokens per second, and now and then another one, to see what it is worth."""

    adapts = True

    def __init__(self, block_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """
        Args:
            block_size: K, at least 2.
            clock: seconds, from any beginning.
        """
        assert block_size >= 2, block_size
        self._block_size = block_size
        self._clock = clock
        self._acceptance = Acceptance(block_size)
        self._drafting, self._plain = StepTimes(), StepTimes()
        self._between_s = 0.0  # two steps, where nothing else is run
        self._probes = 0
        self._steps_since = 0  # the last probe
        self._credit_s = 0.0  # that probes may cost
        self._width = block_size
        self._requests = 0
        self._begun_s = 0.0
        self._ended_s: float | None = None

    def begin(self, requests: int) -> int:
        self._begun_s = self._clock()
        if self._ended_s is not None:
            self._between_s += BETWEEN * (self._begun_s - self._ended_s - self._between_s)
        self._requests = requests
        self._width = self._choose(requests)
        return self._width

    def end(self, commit_lens: Sequence[int]) -> None:
        assert len(commit_lens) == self._requests, (len(commit_lens), self._requests)
        self._ended_s = self._clock()
        took_s = self._ended_s - self._begun_s
        times = self._drafting if self._width > 1 else self._plain
        times.observe(self._requests * self._width, took_s + min(self._between_s, took_s))
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
        self._steps_since += 1
        self._credit_s = min(self._credit_s + PROBES_SHARE * seconds[best - 1], max(seconds))
        if self._steps_since < PROBES_APART:
            return best
        # Twice as wide, where drafts may have become better; half; and plain decoding. In turn, and as time allows.
        probe = (min(2 * best, self._block_size), max(best // 2, 1), 1)[self._probes % 3]
        lost_s = seconds[probe - 1] - lens[probe - 1] / rates[best - 1]
        if lost_s > self._credit_s:
            return best
        self._credit_s -= lost_s
        self._probes += 1
        self._steps_since = 0
        return probe

    def _seconds(self, requests: int, width: int) -> float:
        """What a step is expected to take, once a drafting one was seen."""
        if width > 1:
            return self._drafting.expected(requests * width)
        shortest = self._drafting.expected(requests * 2)  # which plain ones are a part of
        return min(self._plain.expected(requests), shortest) if self._plain.seen else OPTIMISM * shortest


class Acceptance:
    """How often each draft is accepted where all before it were."""

    def __init__(self, block_size: int) -> None:
        self._tried = [0.0] * (block_size - 1)
        self._accepted = [0.0] * (block_size - 1)

    def observe(self, commit_lens: Sequence[int], width: int) -> None:
        """One step: what each request committed of `width` rows."""
        tried = len(commit_lens)
        for draft in range(len(self._tried)):
            accepted = sum(length > draft + 1 for length in commit_lens)
            within = draft < width - 1
            kept = (1 - 1 / (TRIALS if within else UNTRIED)) ** tried
            self._tried[draft] = self._tried[draft] * kept + (tried if within else 0)
            self._accepted[draft] = self._accepted[draft] * kept + accepted
            tried = accepted if within else tried
            if not tried:
                break

    def expected(self) -> list[float]:
        """[K]; the mean commit_len at width 1 .. K."""
        lens, survives, share = [1.0], 1.0, 1.0
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            share = (accepted + DOUBT * share) / (tried + DOUBT)
            survives *= share
            lens.append(lens[-1] + survives)
        return lens


class StepTimes:
    """A line through the seconds of steps over their rows: least squares, older steps counting less.

    The first step counts for nothing: what is done once is done there. While all steps have the same rows, the slope
    is the first guess, see FREE_ROWS.
    """

    def __init__(self) -> None:
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
            if seconds < expected / OUTLIER:
                self._forget()  # so fast it is: what was seen before was disturbed
            seconds = min(seconds, OUTLIER * expected)
        kept = 1 - 1 / STEPS
        self._weight = self._weight * kept + 1
        self._rows = self._rows * kept + rows
        self._seconds = self._seconds * kept + seconds
        self._rows_rows = self._rows_rows * kept + rows * rows
        self._rows_seconds = self._rows_seconds * kept + rows * seconds

    def expected(self, rows: int) -> float:
        """Seconds of a step of so many rows; one must have been seen."""
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_rows - self._rows * mean_rows
        guessed_spread = GUESSED * (mean_rows / 2) ** 2
        guess = mean_seconds / (mean_rows + FREE_ROWS)
        slope = (self._rows_seconds - self._rows * mean_seconds + guessed_spread * guess) / (spread + guessed_spread)
        slope = min(max(slope, 0.0), mean_seconds / mean_rows)  # neither do rows gain time nor is a step free without
        return mean_seconds + slope * (rows - mean_rows)

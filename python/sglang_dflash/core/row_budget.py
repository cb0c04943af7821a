"""Chooses how many rows a step verifies in all, where graphs of fixed sizes verify them and no step waits for a device.

Which rows they are is decided on the device, by the draft's chances. The time of a step, and what its rows should have
brought, are known some steps later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

GRID = 4
"""Points per row of a block at which the gain of more rows is kept."""


class Budget(NamedTuple):
    """The rows of one step.

    Fields:
        rows: verified rows of all requests together, anchors included.
        size: rows of the graph that verifies them, at least as many.
        drafts: whether the draft runs; if not, each request has its anchor alone.
    """

    rows: int
    size: int
    drafts: bool


@dataclass(frozen=True, slots=True)
class BudgetTuning:
    """Tuning values of `RowBudget`.

    Fields:
        gain_weight: share of the latest step in the mean gain of rows; more after steps without a draft.
        time_weight: share of the latest step in the mean time of its size.
        outlier_ratio: ratio of times. A step longer than this ratio times the mean counts as that long only. One
            shorter by more than this ratio replaces the mean: steps before it were disturbed.
        fixed_rows: rows. Of a size below all measured ones, the fixed part of the time is guessed to be that of so many
            rows: few, so that the guess is low. A size above all measured ones is guessed to take no more than these.
        undrafted_share: first guess of the time of a step without a draft, as a share of the smallest step with one.
        probe_steps: steps between two probes.
        undrafted_steps: steps between two probes of the draft, while it does not pay.
        probe_share: a size is probed if its tokens per second should be at least this share of the best.
        any_probe: one probe in so many takes whatever was measured longest ago: times change with the contexts.
    """

    gain_weight: float = 0.2
    time_weight: float = 0.2
    outlier_ratio: float = 1.5
    fixed_rows: int = 16
    undrafted_share: float = 0.8
    probe_steps: int = 48
    undrafted_steps: int = 24
    probe_share: float = 0.85
    any_probe: int = 4


@dataclass(slots=True)
class _Time:
    seconds: float
    step: int  # when it was last measured


class RowBudget:
    """The number of rows with the most expected tokens per second.

    Expected tokens come from the mean gain of the best rows over recent steps, which scales with the number of
    requests. Times are measured for each size of graph and each size of the draft's graph. A size that was never
    measured gets an optimistic guess: so it is tried once if it could be the best. From time to time a size near the
    best is tried again, because times and gains change.
    """

    def __init__(self, block_size: int, sizes: Sequence[int], tuning: BudgetTuning | None = None) -> None:
        """sizes: rows of the graphs, rising; multiples of `block_size`."""
        assert list(sizes) == sorted(sizes) and sizes, sizes
        self._block_size, self._sizes, self._tuning = block_size, list(sizes), tuning or BudgetTuning()
        self._points = np.arange((block_size - 1) * GRID + 1) / GRID
        self._gain: np.ndarray | None = None  # of so many rows more for each request, in tokens for each request
        self._times: dict[tuple[int, int, bool], _Time] = {}  # by the draft's size, the target's, and whether it drafts
        self._met: set[tuple[int, int, bool]] = set()
        self._guesses: dict[tuple[int, int, bool], float] = {}
        self._options = lru_cache(maxsize=256)(self._options_of)
        self._step = self._probed = self._probes = self._seen = 0

    def choose(self, batch: int) -> Budget:
        """Of a step of `batch` requests."""
        self._step += 1
        options = self._options(batch)
        if self._gain is None:  # nothing is known of the draft
            return options[-1]
        rates = [self.tokens(batch, option) / self._seconds(batch, option) for option in options]
        best = max(range(len(options)), key=rates.__getitem__)
        tuning = self._tuning
        if self._step - self._probed < (tuning.probe_steps if options[best].drafts else tuning.undrafted_steps):
            return options[best]
        self._probed = self._step
        self._probes += 1
        if self._probes % tuning.any_probe == 0:
            return min(options, key=lambda option: self._measured(batch, option))
        near = [i for i, rate in enumerate(rates) if rate >= tuning.probe_share * rates[best]]
        if not options[best].drafts:  # otherwise the gain of rows would never be seen again
            near = [max((i for i, option in enumerate(options) if option.drafts), key=rates.__getitem__)]
        return options[min(near, key=lambda i: self._measured(batch, options[i]))]

    def _options_of(self, batch: int) -> list[Budget]:
        """At first without a draft, then by rising rows; the last are whole blocks."""
        most, whole = self._sizes[-1] // self._block_size, batch * self._block_size
        if batch > most:  # no graph has room for as many requests
            return [Budget(batch, batch, False), Budget(whole, whole, True)]
        rows = [size for size in self._sizes if batch < size < whole]
        options = [self._budget(batch, False), *(self._budget(count, True) for count in (*rows, whole))]
        # Without a request of padding, the last request gets the rows of padding: no more than a block has room for.
        return [one for one in options if batch < most or one.size - one.rows < self._block_size]

    def _budget(self, rows: int, drafts: bool) -> Budget:
        return Budget(rows, self._size_for(rows), drafts)

    def _size_for(self, rows: int) -> int:
        """Of the smallest graph with room for so many rows; the rows themselves if none has."""
        place = bisect_left(self._sizes, rows)
        return self._sizes[place] if place < len(self._sizes) else rows

    def tokens(self, batch: int, budget: Budget) -> float:
        """Expected tokens of a step."""
        if not budget.drafts:
            return float(batch)
        assert self._gain is not None
        return batch * (1 + float(np.interp(budget.rows / batch - 1, self._points, self._gain)))

    def see_gains(self, batch: int, gains: np.ndarray) -> None:
        """gains: [batch * (K - 1)] float; see `ops.row_gains`. They are ignored if one is not finite."""
        if not np.isfinite(gains).all():
            return
        rows = np.arange(len(gains) + 1) / batch
        gain = np.interp(self._points, rows, np.concatenate(([0.0], gains)) / batch)
        weight = 1 - (1 - self._tuning.gain_weight) ** max(1, self._step - self._seen)
        self._gain = gain if self._gain is None else self._gain + weight * (gain - self._gain)
        self._seen = self._step

    def see_time(self, batch: int, budget: Budget, seconds: float) -> None:
        """A step took so long, from its beginning to that of the next one, with nothing between them."""
        key = self._key(batch, budget)
        if key not in self._met:  # the first such step may have compiled kernels
            self._met.add(key)
            return
        known = self._times.get(key)
        if known is None or seconds < known.seconds / self._tuning.outlier_ratio:
            self._times[key] = _Time(seconds, self._step)
            self._guesses.clear()
            return
        seconds = min(seconds, self._tuning.outlier_ratio * known.seconds)
        known.seconds += self._tuning.time_weight * (seconds - known.seconds)
        known.step = self._step

    def _key(self, batch: int, budget: Budget) -> tuple[int, int, bool]:
        return self._size_for(batch * self._block_size), budget.size, budget.drafts

    def _measured(self, batch: int, budget: Budget) -> int:
        known = self._times.get(self._key(batch, budget))
        return -1 if known is None else known.step

    def _seconds(self, batch: int, budget: Budget) -> float:
        key = self._key(batch, budget)
        known = self._times.get(key)
        if known is not None:
            return known.seconds
        if key not in self._guesses or self._step % self._tuning.probe_steps == 0:
            self._guesses[key] = self._guess(*key)
        return self._guesses[key]

    def _guess(self, draft_size: int, size: int, drafts: bool) -> float:
        own = self._known(draft_size, drafts)
        others = sorted({key[0] for key in self._times if key[2] == drafts}, key=lambda other: abs(other - draft_size))
        for other in others:  # the target's part of a step does not depend on the draft's size
            times = self._known(other, drafts)
            common = own.keys() & times.keys()
            if size in times and common:
                more_s = sum(own[one] - times[one] for one in common) / len(common)
                return max(times[size] + more_s, times[size] / 2)
        if own or others:
            return self._between(own or self._known(others[0], drafts), size)
        drafted = {} if drafts else self._known(draft_size, True)
        if drafted:
            return self._tuning.undrafted_share * self._between(drafted, size)
        return float(self._tuning.fixed_rows + size)

    def _known(self, draft_size: int, drafts: bool) -> dict[int, float]:
        """Seconds by size."""
        return {key[1]: time.seconds for key, time in self._times.items() if (key[0], key[2]) == (draft_size, drafts)}

    def _between(self, times: dict[int, float], size: int) -> float:
        """Seconds of a size between known ones on a line; above them no more, below them less in proportion."""
        sizes = sorted(times)
        place = bisect_left(sizes, size)
        if 0 < place < len(sizes):
            return float(np.interp(size, sizes, [times[known] for known in sizes]))
        if place:
            return times[sizes[-1]]
        return times[sizes[0]] * (self._tuning.fixed_rows + size) / (self._tuning.fixed_rows + sizes[0])

"""Learns how long a forward takes by its number of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import isotonic_regression

KEPT = 0.98
"""Share of a size's weight that stays when it is measured again: times change as contexts grow."""
OUTLIER = 3.0
"""A time this many times the mean counts as that long only. One as much shorter replaces the mean: steps before it were
disturbed."""
LONG = 500
"""A size that was not used for so many measurements is measured again: a few slow steps must not rule it out."""
STALE, FEW = 8, 3
"""Times are looked up in a table, which is made anew after so many measurements, and at once while a size has few."""


def eighths(rows: int) -> int:
    """The size under which so many rows are measured: one of eight between two powers of two, rounded up."""
    step = 1 << max(0, rows.bit_length() - 4)
    return -(-rows // step) * step


class StepTimes:
    """Mean seconds by size, which never fall as the size rises; lines between the sizes that were measured."""

    def __init__(self, size_of: Callable[[int], int] = eighths) -> None:
        """size_of: a number of rows to the size of forward that serves it, such as a graph's."""
        self.size_of = size_of
        self._sums: dict[int, tuple[float, float, int]] = {}  # size -> weight, seconds times weight, when last seen
        self._met: set[int] = set()
        self._count, self._seen = 0, 0  # measurements: all, and since the table was made
        self._table = np.empty(0)  # seconds of 0, 1, ... rows

    def __len__(self) -> int:
        """Measured sizes."""
        return len(self._sums)

    def has(self, rows: int) -> bool:
        """Whether this size was measured at all."""
        return self.size_of(rows) in self._sums

    def knows(self, rows: int) -> bool:
        """Whether the size of so many rows was measured more than a few times, not long ago."""
        weight, _, seen = self._sums.get(self.size_of(rows), (0.0, 0.0, 0))
        return weight >= FEW and self._count - seen < LONG

    def see(self, rows: int, seconds: float) -> None:
        """A forward over so many rows took so long."""
        size = self.size_of(rows)
        if size not in self._met:  # the first use of a size may compile something
            self._met.add(size)
            return
        weight, total, seen = self._sums.get(size, (0.0, 0.0, 0))
        mean = total / weight if weight else seconds
        if seconds < mean / OUTLIER or self._count - seen > LONG:
            weight, total = 0.0, 0.0
        self._count += 1
        self._sums[size] = weight * KEPT + 1, total * KEPT + min(seconds, OUTLIER * mean), self._count
        self._seen += 1 if weight >= FEW else STALE

    def table(self, most: int) -> np.ndarray:
        """Seconds of forwards over 0 to `most` rows or more, [most + 1 or more] float. Beyond the measured sizes: a
        line through all of them. If there is one size: in proportion, a low guess for fewer rows, so that they are
        tried."""
        if self._seen >= STALE or most >= len(self._table):
            most = max(most, len(self._table) - 1)
            sizes = np.array(sorted(self._sums), dtype=float)
            weights, totals, _ = np.array([self._sums[int(size)] for size in sizes]).T
            means = isotonic_regression(totals / weights, weights=weights).x
            slope = means[0] / sizes[0]
            if len(sizes) > 1:
                slope = max(np.polyfit(sizes, means, 1, w=np.sqrt(weights))[0], 0.0)
            last = sizes[-1] + self.size_of(most)
            seconds = [means[0] - slope * sizes[0], *means, means[-1] + slope * (last - sizes[-1])]
            rows = [self.size_of(count) for count in range(most + 1)]
            self._table = np.interp(rows, [0, *sizes, last], seconds).clip(means[0] / 2)
            self._seen = 0
        return self._table

"""Learns how long a forward takes by its number of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

KEPT = 0.98
"""Share of a size's weight that stays when it is measured again: times change as contexts grow."""
OUTLIER = 3.0
"""A time this many times the mean counts as that long only. One as much shorter replaces the mean: steps before it were
disturbed."""
ALIKE = 1.1
"""Sizes within this factor tell each other's time. Up to 8 rows no two do: there a forward's time has steps."""
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

    def knows(self, rows: int) -> bool:
        """Whether a size like that of so many rows was measured more than a few times, not long ago."""
        size = self.size_of(rows)
        alike = (self._sums[known] for known in self._sums if size <= ALIKE * known and known <= ALIKE * size)
        return any(weight >= FEW and self._count - seen < LONG for weight, _, seen in alike)

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
            rows = np.array([self.size_of(count) for count in range(most + 1)], dtype=float)
            sizes, means, slope = self._fit()
            below = np.maximum(means[0] - slope * (sizes[0] - rows), means[0] / 2)
            above = means[-1] + slope * (rows - sizes[-1])
            inside = np.interp(rows, sizes, means)
            self._table = np.where(rows < sizes[0], below, np.where(rows > sizes[-1], above, inside))
            self._seen = 0
        return self._table

    def _fit(self) -> tuple[np.ndarray, np.ndarray, float]:
        sizes = np.array(sorted(self._sums), dtype=float)
        weights, totals, _ = np.array([self._sums[int(size)] for size in sizes]).T
        pools: list[list[float]] = []  # weight, total, sizes: neighbours that would fall are averaged
        for weight, total in zip(weights, totals, strict=True):
            pools.append([weight, total, 1])
            while len(pools) > 1 and pools[-2][1] / pools[-2][0] > pools[-1][1] / pools[-1][0]:
                last = pools.pop()
                pools[-1] = [one + other for one, other in zip(pools[-1], last, strict=True)]
        means = np.concatenate([[total / weight] * int(count) for weight, total, count in pools])
        if len(sizes) == 1:
            return sizes, means, float(means[0] / sizes[0])
        away = sizes - np.average(sizes, weights=weights)
        slope = (weights * away * means).sum() / (weights * away**2).sum()
        return sizes, means, max(float(slope), 0.0)

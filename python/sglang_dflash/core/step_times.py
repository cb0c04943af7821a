"""Estimates the seconds of a part of a step from its number of rows, out of the times of recent steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeTuning:
    """Tuning values of `StepTimes`.

    Fields:
        decay_steps: steps. After this many new steps, older ones weigh 1/e.
        prior_row_share: share of the fixed time that one row adds. First guess.
        prior_steps: steps. Weight of that guess: it counts as this many steps with half the mean rows.
        outlier_ratio: ratio of times. A step longer than this ratio times its expected time was disturbed: it counts
            as that long only. After a step shorter by more than this ratio, all steps before it are forgotten.
    """

    decay_steps: int = 256
    prior_row_share: float = 1 / 32
    prior_steps: float = 8
    outlier_ratio: float = 3.0


class StepTimes:
    """Seconds as a line over rows, by exponentially weighted ridge regression.

    Each step makes the weights of all steps before it smaller. The line goes through the weighted means of rows and
    seconds. The ridge term shrinks its slope to a first guess (`prior_row_share`), which is the slope while all steps
    have the same rows. The first step is not counted, because it includes one-time work. Steps are kept until the line
    is asked for: to take in several costs little more than one, because this code must first come back into the
    processor's caches, which the model's weights have filled. They are judged by the line before them.
    """

    def __init__(self, tuning: TimeTuning | None = None) -> None:
        self._tuning = tuning or TimeTuning()
        self._warm = False
        self._new: list[tuple[int, float]] = []
        self._latest = (1.0, self._tuning.prior_row_share)
        self._forget()

    def _forget(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    @property
    def seen(self) -> bool:
        return bool(self._new) or self._weight > 0

    def observe(self, rows: int, seconds: float) -> None:
        assert rows > 0 and seconds > 0, (rows, seconds)
        if self._warm:
            self._new.append((rows, seconds))
        self._warm = True

    def line(self) -> tuple[float, float]:
        """Expected seconds as fixed part and part per row, both at least 0; the guess alone before the first step."""
        if self._new:
            line = self._latest if self._weight > 0 else None
            for rows, seconds in self._new:
                line = self._take_in(rows, seconds, line)
            self._new.clear()
            self._latest = self._line()
        return self._latest

    def _take_in(self, rows: int, seconds: float, line: tuple[float, float] | None) -> tuple[float, float]:
        """line: by which the step is judged; None: nothing is known. Returns the line for the next one that waits."""
        if line is not None:
            expected = line[0] + line[1] * rows
            if seconds < expected / self._tuning.outlier_ratio:
                self._forget()
                line = None
            seconds = min(seconds, self._tuning.outlier_ratio * expected)
        kept = 1 - 1 / self._tuning.decay_steps
        self._weight = self._weight * kept + 1
        self._rows = self._rows * kept + rows
        self._seconds = self._seconds * kept + seconds
        self._rows_rows = self._rows_rows * kept + rows * rows
        self._rows_seconds = self._rows_seconds * kept + rows * seconds
        return self._line() if line is None or self._weight <= self._tuning.prior_steps else line

    def _line(self) -> tuple[float, float]:
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        variation = self._rows_rows - self._rows * mean_rows
        covariation = self._rows_seconds - self._rows * mean_seconds
        ridge = self._tuning.prior_steps * (mean_rows / 2) ** 2  # the variation of `prior_steps` such steps
        guess = mean_seconds / (mean_rows + 1 / self._tuning.prior_row_share)
        row_s = (covariation + ridge * guess) / (variation + ridge)
        row_s = min(max(row_s, 0.0), mean_seconds / mean_rows)  # time never falls with rows, nor below 0
        return mean_seconds - row_s * mean_rows, row_s

"""Shows a run's progress as a bar or as log lines, and writes metrics.jsonl."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 20.0
_SMOOTHING = 0.05


class Reporter:
    """Progress of one run: a bar on a terminal, a line every 20 seconds in a log."""

    def __init__(self, metrics: Path, steps: int, done: int, quiet: bool) -> None:
        """
        Args:
            metrics: file to which rows are appended; rows of steps after `done` are removed first.
            steps, done: steps of the whole run, and steps done before this start.
            quiet: print and write nothing; set in all processes but the first.
        """
        self._metrics, self._steps, self._quiet = metrics, steps, quiet
        self.history: list[dict[str, Any]] = []
        self._console = Console(file=sys.stderr, quiet=quiet)
        self._live = self._console.is_terminal and not quiet
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, status="")
        self._tau, self._rate = "", 0.0
        self._started, self._began_at, self._said_at = time.monotonic(), done, 0.0
        if not quiet:
            self._recover(done)
        self._bar.start()

    def _recover(self, done: int) -> None:
        if done and self._metrics.is_file():
            rows = [json.loads(line) for line in self._metrics.read_text().splitlines()]
            self.history = [row for row in rows if row["step"] <= done]
        self._metrics.parent.mkdir(parents=True, exist_ok=True)
        self._metrics.write_text("".join(json.dumps(row) + "\n" for row in self.history))

    def record(self, row: dict[str, Any]) -> None:
        """Appends one row of metrics; it must have a `step`."""
        self.history.append(row)
        if "tau" in row:
            self._tau = f", held-out tau {row['tau']:.2f}"
        if not self._quiet:
            with self._metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def show(self, step: int, loss: float, rows_per_s: float) -> None:
        self._rate += _SMOOTHING * (rows_per_s - self._rate) if self._rate else rows_per_s
        status = f"loss {loss:.3f}{self._tau}, {self._rate:,.0f} block rows/s"
        self._bar.update(self._task, completed=step, status=status)
        now = time.monotonic()
        if not self._live and (now - self._said_at > _LINE_EVERY_S or step == self._steps):
            self._said_at = now
            left_s = (now - self._started) / max(1, step - self._began_at) * (self._steps - step)
            self.say(f"step {step}/{self._steps}: {status}, {left_s / 60:.1f} min left")

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()

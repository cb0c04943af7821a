"""What a run shows while it works, and what it leaves behind: a live bar or plain lines, and metrics.jsonl."""

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
    """One run's progress: a bar where somebody watches, a line now and then in a log."""

    def __init__(self, metrics: Path, steps: int, done: int, quiet: bool) -> None:
        """
        Args:
            metrics: rows are appended to this file; those of steps after `done` are dropped first.
            steps, done: of the whole run, and before this start.
            quiet: other processes than the first say nothing and write nothing.
        """
        self._metrics, self._steps, self._quiet = metrics, steps, quiet
        self.history: list[dict[str, Any]] = []
        self._console = Console(file=sys.stderr, quiet=quiet)
        self._live = self._console.is_terminal and not quiet
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, said="")
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
        """Keeps one row of measures; it must have a `step`."""
        self.history.append(row)
        if "tau" in row:
            self._tau = f", held-out tau {row['tau']:.2f}"
        if not self._quiet:
            with self._metrics.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def show(self, step: int, loss: float, rows_per_s: float) -> None:
        self._rate += _SMOOTHING * (rows_per_s - self._rate) if self._rate else rows_per_s
        said = f"loss {loss:.3f}{self._tau}, {self._rate:,.0f} rows/s"
        self._bar.update(self._task, completed=step, said=said)
        now = time.monotonic()
        if not self._live and (now - self._said_at > _LINE_EVERY_S or step == self._steps):
            self._said_at = now
            left_s = (now - self._started) / max(1, step - self._began_at) * (self._steps - step)
            self.say(f"step {step}/{self._steps}: {said}, {left_s / 60:.1f} min left")

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()

"""Shows progress: a bar on a terminal, a line every 20 seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich import progress
from rich.console import Console

_LINE_EVERY_S = 20.0


class Progress:
    """Shows phases of known length, and waits of unknown length, on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said_at = 0.0
        self._lock = Lock()

    @contextmanager
    def phase(self, name: str, total: int, last_line: bool = True) -> Iterator[Callable[[], None]]:
        """Yields a function to call after each of `total` requests, from any thread.

        Args:
            last_line: whether a log gets a line at the phase's end.
        """
        columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
        times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
        live = self._console.is_terminal
        began = time.monotonic()
        with progress.Progress(*columns, *times, console=self._console, transient=True, disable=not live) as bar:
            task = bar.add_task(name, total=total)
            done = 0

            def advance() -> None:
                nonlocal done
                with self._lock:
                    done += 1
                    bar.advance(task)
                    if not live:
                        left_min = (time.monotonic() - began) / done * (total - done) / 60
                        words = f"{name}: {done:,} of {total:,}" + (f", {left_min:.1f} min left" if left_min else "")
                        self._line(words, force=last_line and done == total)

            yield advance

    @contextmanager
    def waiting(self, name: str) -> Iterator[Callable[[float], None]]:
        """Yields a function to call with the seconds waited."""
        if not self._console.is_terminal:
            self._line(name, force=True)
            yield lambda seconds: self._line(f"{name} {seconds:.0f} s")
            return
        with self._console.status(name) as status:
            yield lambda seconds: status.update(f"{name} {seconds:.0f} s")

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._line(text, force=True)

    def _line(self, text: str, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._said_at > _LINE_EVERY_S:
            self._said_at = now
            self._console.print(text, highlight=False)

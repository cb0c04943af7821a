"""Shows a check's progress: a bar on a terminal, a line every 20 seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINE_EVERY_S = 20.0


class Watch:
    """Shows phases of known length, and waits of unknown length, on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said_at = 0.0
        self._lock = Lock()

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Yields a function to call after each of `total` requests, from any thread."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        live = self._console.is_terminal
        with Progress(*columns, *times, console=self._console, transient=True, disable=not live) as bar:
            task = bar.add_task(name, total=total)
            done = 0

            def advance() -> None:
                nonlocal done
                with self._lock:
                    done += 1
                    bar.advance(task)
                    if not live:
                        self._line(f"{name}: {done} of {total}", force=done == total)

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

    def _line(self, text: str, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._said_at > _LINE_EVERY_S:
            self._said_at = now
            self._console.print(text, highlight=False)

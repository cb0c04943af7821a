"""Shows the progress of a sweep: the current cell and the time left, as a bar or as log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from sglang_dflash.bench.measures import measure
from sglang_dflash.bench.records import Cell, CellKey, Record
from sglang_dflash.serving import Progress


class Board:
    """One per sweep. `cells`: number of cells to run; `starts`: number of servers to start."""

    def __init__(self, console: Console, cells: int, starts: int) -> None:
        self._console = console
        self._progress = Progress(console)
        self._cells, self._starts = cells, starts
        self._done = 0
        self._cell_s: list[float] = []
        self._start_s: list[float] = []

    @contextmanager
    def starting(self, label: str) -> Iterator[Callable[[float], None]]:
        """Yields a function to call with the seconds waited."""
        begin = time.monotonic()
        self._starts = max(0, self._starts - 1)
        with self._progress.waiting(f"starting {label} ...") as on_wait:
            yield on_wait
        self._start_s.append(time.monotonic() - begin)

    @contextmanager
    def cell(self, key: CellKey, requests: int) -> Iterator[Callable[[Record], None]]:
        """Yields a function to call with each answer."""
        begin = time.monotonic()
        title = f"[{self._done + 1}/{self._cells}] {name(key)}, {self.left()}"
        with self._progress.phase(title, requests, last_line=False) as advance:
            yield lambda record: advance()
        self._cell_s.append(time.monotonic() - begin)

    def finished(self, cell: Cell) -> None:
        """Prints one line per cell, which stays on the screen."""
        self._done += 1
        head = f"[{self._done}/{self._cells}] {name(cell.key)}:"
        if cell.failure:
            self._console.print(f"{head} failed: {cell.failure}", style="red", highlight=False, markup=False)
            return
        values = measure(cell)
        words = [f"{values['tok_s']:.0f} tok/s"]
        if cell.equality is not None and cell.equality.withheld:
            differ = f"tokens differ in {cell.equality.different} of {cell.equality.compared} requests"
            self._console.print(head, f"{differ}; {self.left()}", style="red", highlight=False, markup=False)
            return
        if values["tau"] == values["tau"]:
            words.append(f"tau {values['tau']:.2f}")
        if values["failed"]:
            words.append(f"{values['failed']:.0f} failed")
        words.append(f"{cell.wall_s:.1f} s; {self.left()}")
        self._console.print(head, ", ".join(words), highlight=False, markup=False)

    def left(self) -> str:
        """The estimated time left, from the mean time of the cells and starts so far."""
        if not self._cell_s:
            return "time left not known yet"
        mean_cell = sum(self._cell_s) / len(self._cell_s)
        mean_start = sum(self._start_s) / len(self._start_s) if self._start_s else 0.0
        seconds = mean_cell * (self._cells - self._done) + mean_start * self._starts
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def name(key: CellKey) -> str:
    """A short name of a cell."""
    words = [key.arm, key.backend, "" if key.radix else "no prefix cache", key.dataset, f"at {key.load:g}"]
    return f"{', '.join(filter(None, words))} #{key.repeat + 1}"

"""Shows the progress of a sweep: the current cell and the time left, as a bar or as log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean

from rich.console import Console

from sglang_dflash.bench.frame import measure
from sglang_dflash.bench.records import Cell, CellKey
from sglang_dflash.serving import Progress


class Board:
    """One per sweep. `cells`: number of cells to run; `starts`: number of servers to start."""

    def __init__(self, console: Console, cells: int, starts: int) -> None:
        self._console, self._progress = console, Progress(console)
        self._cells, self._starts, self._done = cells, starts, 0
        self._cell_s: list[float] = []
        self._start_s: list[float] = []

    @contextmanager
    def starting(self, label: str) -> Iterator[Callable[[float], None]]:
        """Yields a function to call with the seconds waited."""
        begin, self._starts = time.monotonic(), max(0, self._starts - 1)
        with self._progress.waiting(f"starting {label} ...") as on_wait:
            yield on_wait
        self._start_s.append(time.monotonic() - begin)

    @contextmanager
    def cell(self, key: CellKey, requests: int) -> Iterator[Callable[[], None]]:
        """Yields a function to call after each answer."""
        begin = time.monotonic()
        title = f"[{self._done + 1}/{self._cells}] {name(key)}, {self.left()}"
        with self._progress.phase(title, requests, last_line=False) as advance:
            yield advance
        self._cell_s.append(time.monotonic() - begin)

    def finished(self, cell: Cell) -> None:
        """Prints one line per cell, which stays on the screen."""
        self._done += 1
        values, judged, bad = measure(cell), cell.equality, True
        if cell.failure:
            said = f"failed: {cell.failure}"
        elif judged is not None and judged.withheld:
            said = f"tokens differ in {judged.different} of {judged.compared} requests; {self.left()}"
        else:
            tau = f", tau {values['tau']:.2f}" if values["tau"] == values["tau"] else ""
            failed, bad = f", {values['failed']:.0f} failed" if values["failed"] else "", False
            said = f"{values['tok_s']:.0f} tok/s{tau}{failed}, {cell.wall_s:.1f} s; {self.left()}"
        line = f"[{self._done}/{self._cells}] {name(cell.key)}: {said}"
        self._console.print(line, style="red" if bad else None, highlight=False, markup=False)

    def left(self) -> str:
        """The estimated time left, from the mean time of the cells and starts so far."""
        if not self._cell_s:
            return "time left not known yet"
        seconds = fmean(self._cell_s) * (self._cells - self._done) + fmean(self._start_s or [0.0]) * self._starts
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def name(key: CellKey) -> str:
    """A short name of a cell."""
    words = [key.arm, key.backend, "" if key.radix else "no prefix cache", key.dataset, f"at {key.load:g}"]
    return f"{', '.join(filter(None, words))} #{key.repeat + 1}"

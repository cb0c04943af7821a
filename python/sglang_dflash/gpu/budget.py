"""The time budget of one call: a stage starts nothing that it cannot finish, and finished cells are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from sglang_dflash.bench.board import Board
from sglang_dflash.bench.records import Cell, CellKey, Record, Run
from sglang_dflash.gpu.estimates import CELL_S, TOGETHER_S

MARGIN = 1.3  # factor on the longest time seen so far
GRACE_S = 15.0  # extra time for a cell that takes longer than its estimate


class OutOfTimeError(Exception):
    """The budget is used up; the rest needs another call."""


class Budget:
    """Seconds left in this call.

    Until the first cell is finished, an estimate never stops the call: otherwise every call could end with no cell.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._finished = False

    @property
    def left_s(self) -> float:
        return self._end - self._clock()

    def begin(self, what: str, needed_s: float) -> None:
        """
        Raises:
            OutOfTimeError: fewer than `needed_s` seconds are left.
        """
        if self.left_s <= 0 or (self._finished and needed_s > self.left_s):
            raise OutOfTimeError(f"{what} needs about {needed_s:.0f} s, {max(0.0, self.left_s):.0f} s are left")

    def finished(self) -> None:
        """Records that a cell is finished."""
        self._finished = True

    def check(self, what: str, grace_s: float = 0.0) -> None:
        """
        Raises:
            OutOfTimeError: the budget and `grace_s` are used up.
        """
        if self.left_s + grace_s <= 0:
            raise OutOfTimeError(f"{what} used all the time that was left")


class BudgetBoard(Board):
    """A sweep's board that ends the sweep in time. It estimates a start or a cell from the previous ones."""

    def __init__(
        self, console: Console, cells: int, starts: int, budget: Budget, run: Run, keep: Callable[[], None]
    ) -> None:
        """keep: called when a cell is finished and saved in the run."""
        super().__init__(console, cells, starts)
        self._budget = budget
        self._run = run
        self._keep = keep

    @contextmanager
    def starting(self, label: str) -> Iterator[Callable[[float], None]]:
        self._budget.begin(f"starting {label}", self.start_s() + self.cell_s("", None))
        with super().starting(label) as on_wait:

            def wait(seconds: float) -> None:
                self._budget.check(f"starting {label}")
                on_wait(seconds)

            yield wait

    @contextmanager
    def cell(self, key: CellKey, requests: int) -> Iterator[Callable[[Record], None]]:
        self._budget.begin(f"{key.arm} at {key.load:g}", self.cell_s(key.arm, key.load))
        with super().cell(key, requests) as on_answer:

            def answered(record: Record) -> None:
                self._budget.check(f"{key.arm} at {key.load:g}", GRACE_S)
                on_answer(record)

            yield answered

    def finished(self, cell: Cell) -> None:
        super().finished(cell)
        self._budget.finished()
        self._keep()

    def start_s(self) -> float:
        """Estimated seconds until servers are up: the longest start so far, else that of all at once."""
        return MARGIN * max((server["start_s"] for server in self._run.servers), default=TOGETHER_S / MARGIN)

    def cell_s(self, arm: str, load: float | None) -> float:
        """Estimated seconds of an arm's cell at this load, from its own cells, else from those of others at this load,
        else from all. None: the longest of all loads."""
        played = [cell for cell in self._run.cells if cell.wall_s]
        same = [cell for cell in played if load in (None, cell.key.load)]
        own = [cell for cell in same if cell.key.arm == arm]
        return MARGIN * max((cell.wall_s for cell in own or same or played), default=CELL_S / MARGIN)

"""Runs a sweep: one server works at a time, one cell after another, and each cell is saved as soon as it is done."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import httpx

from sglang_dflash.bench.board import Board, name
from sglang_dflash.bench.drivers import Driver
from sglang_dflash.bench.equality import Reference, judge
from sglang_dflash.bench.plan import Plan
from sglang_dflash.bench.records import Cell, CellKey, Run
from sglang_dflash.bench.started_arms import FAILURES, StartedArms
from sglang_dflash.serving import Arm, ServerError, TiePolicy, last_error, sentence
from sglang_dflash.serving.arms import reference_arm
from sglang_dflash.serving.errors import log_lines
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.traffic import prompts_of

LOG_LINES = 15
LONGEST = 600  # characters of a failure's sentence


class Sweep:
    """Executes a plan and fills a run. If a server fails, the other cells are still measured."""

    def __init__(self, plan: Plan, run: Run, renderer: Renderer, results: Path, deadline_s: float = math.inf) -> None:
        """
        Args:
            run: empty, or with the cells that an earlier sweep finished.
            results: file to which the run is saved after every cell.
            deadline_s: the value of time.monotonic() from which on no further cell or server starts.
        """
        self._plan = plan
        self._run = run
        self._renderer = renderer
        self._results = results
        self._deadline_s = deadline_s
        self._reference_arm = reference_arm(plan.arms)
        self._references: dict[tuple[str, str], Reference] = {}

    def go(self, make_board: Callable[[int, int], Board]) -> None:
        """
        Args:
            make_board: makes a board from the numbers of cells to run and of servers to start.
        """
        done = self._run.done()
        for cell in self._run.cells:
            if cell.key in done and cell.key.arm == self._reference_arm.name:
                self._reference(cell.key).learn(cell.records, self._prompts(cell))
        todo = self._plan.servers(done)
        arms = list({arm.label: arm for arm, _ in todo}.values())
        starts = min(1, len(arms)) if self._plan.together else len(todo)
        board = make_board(sum(len(keys) for _, keys in todo), starts)
        with closing(StartedArms(self._plan, self._renderer, board, self._note_server)) as started:
            if self._plan.together and arms and self._in_time():
                started.start(arms)
            for arm, keys in todo:
                waiting = list(keys)
                while waiting and self._in_time():
                    self._serve(started, arm, waiting, board)
                if not self._plan.together:
                    started.stop(arm)
        self._settle()

    def _in_time(self) -> bool:
        return time.monotonic() < self._deadline_s

    def _serve(self, started: StartedArms, arm: Arm, waiting: list[CellKey], board: Board) -> None:
        """Has the arm run cells from `waiting` until none is left, its server is lost or the time is over.

        A lost server fails the current cell, and is started again for the next.
        """
        with ExitStack() as stack:
            try:
                driver = stack.enter_context(started.turn(arm))
            except FAILURES as error:
                log = started.log(arm)
                ended = log.is_file() and "ended before" in str(error)
                failure = sentence(f"{arm.label} did not start: {last_error(log) if ended else error}", LONGEST)
                while waiting:
                    self._keep(Cell(waiting.pop(0), failure=failure, log_tail=_tail(log)), board)
                return
            while waiting and self._in_time():
                key = waiting.pop(0)
                cell = self._play(arm, driver, key, board)
                if cell.failure:
                    cell.log_tail = _tail(started.log(arm))
                self._keep(cell, board)
                if cell.failure:
                    started.stop(arm)
                    return

    def _play(self, arm: Arm, driver: Driver, key: CellKey, board: Board) -> Cell:
        """Runs one cell. Its failure says why the arm is lost."""
        sessions = self._plan.sessions(key)
        if not self._plan.open_loop and len(sessions) < key.load:
            self._note(
                f"{key.dataset} at {key.load:g}: only {len(sessions)} sessions in flight, because there are no more."
            )
        requests = sum(len(session.turns) for session in sessions)
        cell = Cell(key)
        try:
            with board.cell(key, requests) as on_answer:
                cell = driver.play(key, sessions, on_answer)
            lost = driver.lost(cell)
            if not lost:
                self._compare(arm, driver, cell)
        except (ServerError, httpx.HTTPError, ValueError) as error:
            lost = str(error) or type(error).__name__
        if lost:
            cell.failure = sentence(lost, LONGEST)
        if cell.unasked:
            self._note(f"{key.dataset}: some sessions end early, because the context is full.")
        if not driver.flushes:
            self._note(f"{arm.name}: its prefix cache could not be emptied between cells, so TTFT may be too low.")
        return cell

    def _compare(self, arm: Arm, driver: Driver, cell: Cell) -> None:
        """Sets the cell's equality. The reference arm's first answer to a request is the one to compare with."""
        prompts = self._prompts(cell)
        reference = self._reference(cell.key)
        if arm.name == self._reference_arm.name:
            reference.learn(cell.records, prompts)
        must_agree = self._must_agree(arm)
        cell.equality = judge(reference, cell.records, prompts, must_agree, driver.gap(), driver.tie_policy)
        if arm.simulated:
            self._note(f"{arm.name}: acceptance is simulated, so its tokens are not the target's.")

    def _must_agree(self, arm: Arm) -> bool:
        greedy = self._plan.sampling.temperature == 0
        same = arm.engine == self._reference_arm.engine == "sglang"
        return greedy and same and not arm.simulated and not self._reference_arm.simulated

    def _settle(self) -> None:
        """Judges again, without a server, cells that were played before their reference. Notes missing references."""
        arms = {arm.name: arm for arm in self._plan.arms}
        for cell in self._run.cells:
            if cell.failure or cell.key.arm not in arms:
                continue
            answered = sum(not record.failure for record in cell.records)
            held = cell.equality
            if held is None or held.reference != self._reference_arm.name or held.compared + held.unjudged < answered:
                must_agree = self._must_agree(arms[cell.key.arm])
                reference = self._reference(cell.key)
                held = judge(reference, cell.records, self._prompts(cell), must_agree, None, lambda: TiePolicy(0.0))
                cell.equality = held
            lacking = answered - held.compared - held.unjudged
            if lacking:
                self._note(
                    f"{name(cell.key)}: {lacking} of {answered} answers could not be compared, because "
                    f"{self._reference_arm.name} has no answer to these requests."
                )
        self._run.save(self._results)

    def _prompts(self, cell: Cell) -> dict[str, list[int]]:
        return prompts_of(self._plan.sessions(cell.key), cell.records, self._renderer)

    def _reference(self, key: CellKey) -> Reference:
        """One per dataset and attention backend. An arm with another backend uses the reference arm's first backend."""
        backends = [arm.backend for arm in self._plan.arms if arm.name == self._reference_arm.name]
        backend = key.backend if key.backend in backends else backends[0]
        return self._references.setdefault((key.dataset, backend), Reference(self._reference_arm.name))

    def _keep(self, cell: Cell, board: Board) -> None:
        self._run.cells = [held for held in self._run.cells if held.key != cell.key] + [cell]
        self._run.save(self._results)
        board.finished(cell)

    def _note(self, sentence: str) -> None:
        if sentence not in self._run.notes:
            self._run.notes.append(sentence)

    def _note_server(self, arm: Arm, seconds: float) -> None:
        command = [_portable(word) for word in (*arm.launch, *arm.arguments)]
        words = {"command": command, "environment": arm.variables, "url": arm.url}
        self._run.servers.append({"arm": arm.label, "start_s": round(seconds, 1), **words})


def _tail(log: Path) -> list[str]:
    return log_lines(log)[-LOG_LINES:]


def _portable(word: str) -> str:
    """A word of a command without this machine's folders, because results are shared."""
    package = str(Path(__file__).parents[1])
    return "python" if word == sys.executable else word.replace(package, "sglang_dflash")

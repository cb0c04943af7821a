"""Runs a sweep: one server works at a time, one cell after another, and each cell is saved as soon as it is done."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import httpx

from sglang_dflash.bench.board import Board, name
from sglang_dflash.bench.equality import Prompted, Reference
from sglang_dflash.bench.plan import Plan
from sglang_dflash.bench.records import Cell, CellKey, Run
from sglang_dflash.bench.stations import FAILURES, ServerDriver, Station, TransformersDriver
from sglang_dflash.serving import Arm, ServerError, last_error, sentence
from sglang_dflash.serving.arms import reference_arm
from sglang_dflash.serving.errors import log_lines
from sglang_dflash.serving.records import Record
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.server import stop_all
from sglang_dflash.serving.traffic import prompted

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
        self._plan, self._run, self._renderer, self._results = plan, run, renderer, results
        self._deadline_s, self._starts = deadline_s, 0
        self._own = reference_arm(plan.arms)
        self._references: dict[tuple[str, str], Reference] = {}

    def go(self, make_board: Callable[[int, int], Board]) -> None:
        """make_board: makes a board from the numbers of cells to run and of servers to start."""
        done = self._run.done()
        for cell in self._run.cells:
            if cell.key in done and cell.key.arm == self._own.name:
                self._reference(cell.key).learn(self._prompted(cell))
        todo = self._plan.servers(done)
        stations = {arm.label: Station(arm, self._plan, self._renderer, self._log_of) for arm, _ in todo}
        starts = min(1, len(stations)) if self._plan.together else len(todo)
        board = make_board(sum(len(keys) for _, keys in todo), starts)
        with ExitStack() as stack:
            for station in stations.values():
                stack.callback(station.stop)
            stack.callback(lambda: stop_all([one.server for one in stations.values() if one.server]))
            if self._plan.together and stations and self._in_time():
                self._start(list(stations.values()), board)
            for arm, keys in todo:
                waiting, station = list(keys), stations[arm.label]
                while waiting and self._in_time():
                    self._serve(station, waiting, board)
                if not self._plan.together:
                    station.stop()
        self._settle()

    def _in_time(self) -> bool:
        return time.monotonic() < self._deadline_s

    def _log_of(self, label: str) -> Path:
        self._starts += 1
        return self._plan.logs / f"{self._starts:02}-{label.replace(', ', '-').replace(' ', '-')}.log"

    def _start(self, stations: Sequence[Station], board: Board) -> None:
        """Starts arms at once, and pauses them when all are up. One that fails says so when it is asked."""
        begin = time.monotonic()
        with board.starting(", ".join(station.arm.label for station in stations)) as on_wait:
            for station in stations:
                with suppress(*FAILURES):
                    station.launch()
            for station in [station for station in stations if station.failure is None]:
                with suppress(*FAILURES):
                    station.wait(on_wait)
                    self._note_server(station.arm, time.monotonic() - begin)
        for station in stations:
            if station.server is not None:
                station.server.pause()

    def _serve(self, station: Station, waiting: list[CellKey], board: Board) -> None:
        """Has an arm run cells from `waiting` until none is left, its server is lost or the time is over.

        A lost server fails the current cell, and is started again for the next.
        """
        with ExitStack() as stack:
            try:
                driver = stack.enter_context(station.turn(board, self._note_server))
            except FAILURES as error:
                ended = station.log.is_file() and "ended before" in str(error)
                why = f"{station.arm.label} did not start: {last_error(station.log) if ended else error}"
                while waiting:
                    self._keep(Cell(waiting.pop(0), failure=why), station, board)
                return
            while waiting and self._in_time():
                cell = self._play(station.arm, driver, waiting.pop(0), board)
                self._keep(cell, station, board)
                if cell.failure:
                    station.stop()
                    return

    def _play(self, arm: Arm, driver: ServerDriver | TransformersDriver, key: CellKey, board: Board) -> Cell:
        """Runs one cell. Its failure says why the arm is lost."""
        sessions, held, cell = self._plan.sessions(key), self._answers(key), Cell(key)
        if self._plan.workload != "open-loop" and len(sessions) < key.load:
            self._note(f"{key.dataset} at {key.load:g}: only {len(sessions)} in flight, because there are no more.")
        try:
            passes = not held and self._plan.workload != "agent" and arm.engine != "transformers"
            turns = sum(len(session.turns) for session in sessions)
            with board.cell(key, turns * (1 + passes)) as on_answer:
                cell = driver.run(key, sessions, held, on_answer)
            failures = [record.failure for record in cell.records]
            lost = driver.end(any(failures)) or (failures[0] if all(failures) else "")
            if not lost:
                self._compare(arm, driver, cell)
        except (ServerError, httpx.HTTPError, ValueError) as error:
            lost = driver.end(True) or str(error) or type(error).__name__
        cell.failure = lost
        if cell.unasked:
            self._note(f"{key.dataset}: some sessions end early, because the context is full.")
        if not driver.flushes:
            self._note(f"{arm.name}: its prefix cache could not be emptied between cells, so TTFT may be too low.")
        return cell

    def _answers(self, key: CellKey) -> list[Record]:
        """Those of the pass that the arm has made at this load in another repeat; none if there was no such pass."""
        cells = (cell for cell in self._run.cells if replace(cell.key, repeat=key.repeat) == key and not cell.failure)
        return next((cell.answers for cell in cells if cell.answers), [])

    def _compare(self, arm: Arm, driver: ServerDriver | TransformersDriver, cell: Cell) -> None:
        """Sets the cell's equality. The reference arm's first answer to a request is the one to compare with."""
        answers, reference = self._prompted(cell), self._reference(cell.key)
        if arm.name == self._own.name:
            reference.learn(answers)
        if answers:
            cell.equality = reference.judge(answers, self._must_agree(arm), driver.target)
        if arm.simulated:
            self._note(f"{arm.name}: acceptance is simulated, so its tokens are not the target's.")

    def _must_agree(self, arm: Arm) -> bool:
        exact = [one.engine == "sglang" and not one.simulated for one in (arm, self._own)]
        return self._plan.sampling.temperature == 0 and all(exact)

    def _settle(self) -> None:
        """Judges again, without a server, cells that were played before their reference. Notes missing references."""
        arms = {arm.name: arm for arm in self._plan.arms}
        for cell in self._run.cells:
            count = sum(not answer.failure for answer in cell.comparable)
            if cell.failure or cell.key.arm not in arms or not count:
                continue
            held = cell.equality
            if held is None or held.reference != self._own.name or held.compared + held.unjudged < count:
                must_agree, reference = self._must_agree(arms[cell.key.arm]), self._reference(cell.key)
                held = cell.equality = reference.judge(self._prompted(cell), must_agree, None)
            if lacking := count - held.compared - held.unjudged:
                why = f"because {self._own.name} has no answer to these requests"
                self._note(f"{name(cell.key)}: {lacking} of {count} answers could not be compared, {why}.")
        self._run.save(self._results)

    def _prompted(self, cell: Cell) -> Prompted:
        return prompted(self._plan.sessions(cell.key), cell.comparable, self._renderer)

    def _reference(self, key: CellKey) -> Reference:
        """One per dataset and attention backend. An arm with another backend uses the reference arm's first backend."""
        backends = [arm.backend for arm in self._plan.arms if arm.name == self._own.name]
        backend = key.backend if key.backend in backends else backends[0]
        return self._references.setdefault((key.dataset, backend), Reference(self._own.name))

    def _keep(self, cell: Cell, station: Station, board: Board) -> None:
        if cell.failure:
            cell.failure, cell.log_tail = sentence(cell.failure, LONGEST), log_lines(station.log)[-LOG_LINES:]
        self._run.cells = [held for held in self._run.cells if held.key != cell.key] + [cell]
        self._run.save(self._results)
        board.finished(cell)

    def _note(self, note: str) -> None:
        if note not in self._run.notes:
            self._run.notes.append(note)

    def _note_server(self, arm: Arm, seconds: float) -> None:
        """Notes the command without this machine's folders, because results are shared."""
        package = str(Path(__file__).parents[1])
        words = ["python" if word == sys.executable else word for word in (*arm.launch, *arm.arguments)]
        command = [word.replace(package, "sglang_dflash") for word in words]
        held = {"command": command, "environment": arm.variables, "url": arm.url, "start_s": round(seconds, 1)}
        self._run.servers.append({"arm": arm.label, **held})

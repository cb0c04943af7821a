"""The arms of a sweep: how each is started, asked and stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import httpx

from sglang_dflash.bench.board import Board
from sglang_dflash.bench.plan import Plan
from sglang_dflash.bench.records import Cell, CellKey
from sglang_dflash.serving import AcceptanceStats, Arm, Server, ServerError
from sglang_dflash.serving.batches import TransformersProcess, transformers_up
from sglang_dflash.serving.counters import acceptance_between, prefilled_between
from sglang_dflash.serving.endpoint import Endpoint, Sampling
from sglang_dflash.serving.info import detect_engine
from sglang_dflash.serving.records import Record
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.server import RunningServer
from sglang_dflash.serving.sessions import Session
from sglang_dflash.serving.timing import Timer, Traffic
from sglang_dflash.serving.traffic import play, prompted

WARM_TOKENS = 16
PASS_AT_ONCE = 8  # requests of the pass before an open loop
ENDING_S = 2.0  # how long a server whose stream broke may take to end
FAILURES = (ServerError, httpx.HTTPError, ValueError, OSError)
"""What an arm raises that does not start."""


class ServerDriver:
    """Asks a server over HTTP: a cell is a pass whose tokens are compared, then the same requests once more, timed.

    Its methods raise ServerError, httpx.HTTPError or ValueError if the server is lost.

    Fields:
        flushes: False if it has a prefix cache that could not be emptied before the cell.
        target: asked for logits where two answers differ; None if it cannot be asked.
    """

    flushes = True

    def __init__(self, arm: Arm, server: Server | RunningServer, plan: Plan, renderer: Renderer, log: Path) -> None:
        """log: file for the output of SGLang's client."""
        self._server, self._plan, self._renderer, self._radix = server, plan, renderer, arm.radix
        self._engine = detect_engine(server.url) if arm.engine == "other" else arm.engine
        key = os.environ.get("OPENAI_API_KEY", "") if arm.url else ""
        self._endpoint = Endpoint(server.url, self._engine, plan.stall_s, key)
        self._timer = Timer(self._endpoint, plan.target, renderer.count, log)
        self.target = server.client() if self._engine == "sglang" else None

    def warm_up(self) -> None:
        """Asks for short answers before the first cell, so that no cell includes one-time costs."""
        sessions = next(iter(self._plan.datasets.values()))
        most = 1 if self._plan.workload == "open-loop" else min(len(sessions), round(max(self._plan.loads)))
        for load in sorted({1, most}):
            short = [replace(session, turns=session.turns[:1]) for session in sessions[:load]]
            answers = play(self._endpoint, self._renderer, short, load, Sampling(WARM_TOKENS))
            if all(record.failure for record in answers):
                raise ServerError(answers[0].failure)

    def run(self, key: CellKey, sessions: list[Session], held: list[Record], on_answer: Callable[[], None]) -> Cell:
        """
        Args:
            held: the answers of an earlier pass of these sessions at this load; empty: a pass comes first.
            on_answer: called for each answer, also of the pass.
        """
        self.flushes = self._endpoint.flush() or not self._radix
        if self._plan.workload == "agent":  # SGLang's client has no pauses
            cell = self._passed(key, sessions, on_answer)
            cell.wall_s = max(one.end_s for one in cell.records) - min(one.start_s for one in cell.records)
            return cell
        cell = Cell(key, held) if held else self._passed(key, sessions, on_answer)
        answers, cell.records = cell.records, [one for one in cell.records if one.failure]
        cell.answers = [] if held else answers
        asked = sorted(prompted(sessions, answers, self._renderer), key=lambda one: one[0].turn)
        if asked:  # a later turn's prompt holds the pass's answers to the earlier ones
            plan, flush = self._plan, self.flushes and self._radix
            traffic = Traffic(key.load, plan.workload == "open-loop", plan.seed, flush, plan.stall_s)
            timed, cell.wall_s = self._timer.time(asked, plan.sampling, traffic, on_answer)
            cell.records += timed
        return cell

    def _passed(self, key: CellKey, sessions: list[Session], on_answer: Callable[[], None]) -> Cell:
        """A cell with the answers to all turns."""
        plan, before = self._plan, self._endpoint.counters()
        at_once = PASS_AT_ONCE if plan.workload == "open-loop" else round(key.load)
        think_s = plan.think_s if plan.workload == "agent" else 0.0
        records = play(self._endpoint, self._renderer, sessions, at_once, plan.sampling, on_answer, think_s)
        after, broken = self._endpoint.counters(), {record.session for record in records if record.failure}
        acceptance = acceptance_between(before, after) if self._engine == "vllm" else None
        turns = sum(len(session.turns) for session in sessions if session.id not in broken)
        cell = Cell(key, records, acceptance=acceptance or AcceptanceStats.of(records))
        cell.unasked = turns - sum(record.session not in broken for record in records)
        cell.prefilled = prefilled_between(before, after)
        return cell

    def end(self, broken: bool) -> str:
        """Why the arm's server has ended; "" if it has not."""
        if self._server.ended(ENDING_S if broken else 0.0):
            return f"the server ended: {self._server.last_words()}"
        return ""


class TransformersDriver:
    """Sends static batches of `load` prompts to the transformers process: the first turn of every session."""

    flushes, target = True, None

    def __init__(self, process: TransformersProcess, plan: Plan, renderer: Renderer) -> None:
        self._process, self._plan, self._renderer = process, plan, renderer

    def warm_up(self) -> None:
        sessions = next(iter(self._plan.datasets.values()))
        self._process.play(sessions[:1], self._renderer, 1, Sampling(WARM_TOKENS))

    def run(self, key: CellKey, sessions: list[Session], held: list[Record], on_answer: Callable[[], None]) -> Cell:
        begin = time.perf_counter()
        records = self._process.play(sessions, self._renderer, round(key.load), self._plan.sampling, on_answer)
        return Cell(key, records, time.perf_counter() - begin, acceptance=AcceptanceStats.of(records))

    def end(self, broken: bool) -> str:
        return ""


class Station:
    """One arm: starts its server when it is first asked, pauses it between its turns, stops it at the end.

    Fields:
        server: None: nothing was started here.
        log: of the latest start; no file if the arm writes none here.
        failure: why the arm did not start. It is not started again before `stop`.
    """

    def __init__(self, arm: Arm, plan: Plan, renderer: Renderer, log_of: Callable[[str], Path]) -> None:
        """log_of: makes the path of the log of the next start."""
        self.arm, self.log = arm, Path()
        self.server: Server | None = None
        self.failure: Exception | None = None
        self._plan, self._renderer, self._log_of = plan, renderer, log_of
        self._driver: ServerDriver | TransformersDriver | None = None
        self._warm, self._stack = False, ExitStack()

    def launch(self) -> None:
        """Starts the arm's server if it has one of its own, and waits for nothing."""
        self.log = self._log_of(self.arm.label)
        with self._keeping():
            if not self.arm.url and self.arm.engine != "transformers":
                self.server = self.arm.server(self.log)
                self._stack.callback(self.server.stop)
                self.server.launch()

    def wait(self, on_wait: Callable[[float], None]) -> None:
        """Waits until the launched arm answers."""
        plan = self._plan
        with self._keeping():
            if self.arm.engine == "transformers":
                up = transformers_up(self.arm, self.log, plan.start_s, plan.stall_s)
                self._driver = TransformersDriver(self._stack.enter_context(up), plan, self._renderer)
            else:
                server = self.server.wait(plan.start_s, on_wait) if self.server else RunningServer(self.arm.url)
                log = self.log.with_suffix(".client.log")
                self._driver = ServerDriver(self.arm, server, plan, self._renderer, log)

    @contextmanager
    def turn(self, board: Board, note: Callable[[Arm, float], None]) -> Iterator[ServerDriver | TransformersDriver]:
        """The arm works within this block; at its end its server is paused. The first turn warms it up. Raises one of
        FAILURES if it does not start.

        Args:
            note: called with the arm if this starts it, and the seconds that this took.
        """
        if self.failure is not None:
            raise self.failure
        if self.server is not None and self.server.ended():
            self.stop()
        if self._driver is None:
            begin = time.monotonic()
            with board.starting(self.arm.label) as on_wait:
                self.launch()
                self.wait(on_wait)
                self._warm_up()
            note(self.arm, time.monotonic() - begin)
        with nullcontext() if self.server is None else self.server.at_work():
            yield self._warm_up()

    def stop(self) -> None:
        """The arm is started anew when it is asked again."""
        self._stack.close()
        self.server = self.failure = self._driver = None
        self._warm = False

    def _warm_up(self) -> ServerDriver | TransformersDriver:
        assert self._driver is not None
        with self._keeping():
            if not self._warm:
                self._driver.warm_up()
        self._warm = True
        return self._driver

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Stops the arm if the block fails, and keeps the error."""
        try:
            yield
        except FAILURES as error:
            self.stop()
            self.failure = error
            raise

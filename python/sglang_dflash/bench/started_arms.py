"""The arms of a sweep that are up. One works at a time; the servers of the others are paused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sglang_dflash.bench.board import Board
from sglang_dflash.bench.drivers import Driver, ServerDriver, TransformersDriver
from sglang_dflash.bench.plan import Plan
from sglang_dflash.serving import Arm, Server, ServerError
from sglang_dflash.serving.batches import transformers_up
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.server import RunningServer, stop_all

FAILURES = (ServerError, httpx.HTTPError, ValueError, OSError)
"""What an arm raises that does not start."""


@dataclass(slots=True)
class _Started:
    """An arm that was started.

    Fields:
        server: None: somebody else started it, or it is no server.
        driver: None: it has not answered yet.
        warm: whether it was warmed up.
        stack: stops what was started here.
    """

    server: Server | None
    driver: Driver | None = None
    warm: bool = False
    stack: ExitStack = field(default_factory=ExitStack)

    def ended(self) -> bool:
        return self.server is not None and self.server.ended()

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self.server is None else self.server.at_work()


class StartedArms:
    """Starts an arm when it is first asked, or several arms at once, and starts an arm anew if its server has ended.
    `close` stops all."""

    def __init__(self, plan: Plan, renderer: Renderer, board: Board, note: Callable[[Arm, float], None]) -> None:
        """note: called with each arm that has come up, and the seconds that this took."""
        self._plan, self._renderer, self._board, self._note = plan, renderer, board, note
        self._arms: dict[str, _Started] = {}  # by label, as the next two
        self._failures: dict[str, Exception] = {}  # of arms that did not start
        self._logs: dict[str, Path] = {}  # of the latest starts
        self._starts = 0

    def close(self) -> None:
        with ExitStack() as stack:
            for started in self._arms.values():
                stack.push(started.stack)
            stop_all(self._servers())

    def log(self, arm: Arm) -> Path:
        """The log of an arm that was asked for; no file if the arm writes none here."""
        return self._logs[arm.label]

    def start(self, arms: Sequence[Arm]) -> None:
        """Starts arms at once, and pauses them when all are up. One that fails says so when it is asked."""
        begin = time.monotonic()
        with self._board.starting(", ".join(arm.label for arm in arms)) as on_wait:
            for arm in arms:
                with suppress(*FAILURES), self._failing(arm):
                    self._launch(arm)
            for arm in [arm for arm in arms if arm.label in self._arms]:
                with suppress(*FAILURES), self._failing(arm):
                    self._wait(arm, on_wait)
                    self._note(arm, time.monotonic() - begin)
        for server in self._servers():
            server.pause()

    @contextmanager
    def turn(self, arm: Arm) -> Iterator[Driver]:
        """The arm works within this block. At its end the arm's server is paused.

        Raises:
            ServerError, httpx.HTTPError, ValueError, OSError: it does not start.
        """
        if failure := self._failures.get(arm.label):
            raise failure
        if arm.label in self._arms and self._arms[arm.label].ended():
            self.stop(arm)
        with self._failing(arm):
            if arm.label not in self._arms:
                begin = time.monotonic()
                with self._board.starting(arm.label) as on_wait:
                    self._launch(arm)
                    self._wait(arm, on_wait)
                    self._warm_up(arm)
                self._note(arm, time.monotonic() - begin)
        started = self._arms[arm.label]
        with started.at_work():
            with self._failing(arm):
                self._warm_up(arm)
            assert started.driver is not None
            yield started.driver

    def stop(self, arm: Arm) -> None:
        """Stops an arm. It is started anew when it is asked again."""
        self._failures.pop(arm.label, None)
        if started := self._arms.pop(arm.label, None):
            started.stack.close()

    def _servers(self) -> list[Server]:
        return [started.server for started in self._arms.values() if started.server is not None]

    @contextmanager
    def _failing(self, arm: Arm) -> Iterator[None]:
        """Stops the arm if the block fails, and keeps the error."""
        try:
            yield
        except FAILURES as error:
            self.stop(arm)
            self._failures[arm.label] = error
            raise

    def _launch(self, arm: Arm) -> None:
        """Starts the arm's server if it has one of its own, and waits for nothing."""
        self._starts += 1
        words = arm.label.replace(", ", "-").replace(" ", "-")
        log = self._logs[arm.label] = self._plan.logs / f"{self._starts:02}-{words}.log"
        own = not arm.url and arm.engine != "transformers"
        started = self._arms[arm.label] = _Started(arm.server(log) if own else None)
        if started.server is not None:
            started.stack.callback(started.server.stop)
            started.server.launch()

    def _wait(self, arm: Arm, on_wait: Callable[[float], None]) -> None:
        """Waits until the arm answers."""
        plan, started = self._plan, self._arms[arm.label]
        if arm.engine == "transformers":
            process = started.stack.enter_context(transformers_up(arm, self.log(arm), plan.start_s, plan.stall_s))
            started.driver = TransformersDriver(process, plan, self._renderer)
        else:
            server = started.server.wait(plan.start_s, on_wait) if started.server else RunningServer(arm.url)
            started.driver = ServerDriver(arm, server, plan, self._renderer)

    def _warm_up(self, arm: Arm) -> None:
        started = self._arms[arm.label]
        if self._plan.warm_up and not started.warm and started.driver is not None:
            started.driver.warm_up()
        started.warm = True

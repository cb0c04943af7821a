"""Plays a cell on an arm: over HTTP against a server, or in batches in the transformers process."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from sglang_dflash.bench.arms import Arm
from sglang_dflash.bench.asking import Endpoint, Sampling
from sglang_dflash.bench.counters import acceptance_between
from sglang_dflash.bench.equality import Gap, sglang_gap
from sglang_dflash.bench.plan import Plan
from sglang_dflash.bench.records import Acceptance, Cell, CellKey, Record, total_acceptance
from sglang_dflash.bench.rendering import Renderer
from sglang_dflash.bench.sessions import Session
from sglang_dflash.bench.traffic import Played, Player
from sglang_dflash.bench.transformers_arm import TransformersProcess, play_batches, transformers_up
from sglang_dflash.checking.arms import ServerInfo
from sglang_dflash.checking.compare import Tolerance
from sglang_dflash.serving import Client, Server, ServerError

WARM_TOKENS = 16
ENDING_S = 2.0  # how long a server whose stream broke may take to end
OnAnswer = Callable[[Record], None]


class Driver(ABC):
    """A running arm."""

    flushes = True
    """False if the arm has a prefix cache that could not be emptied before the cell."""

    @abstractmethod
    def warm_up(self) -> None:
        """Asks for short answers before the first cell, so that no cell includes one-time costs.

        Raises:
            ServerError, httpx.HTTPError, ValueError: no request was answered.
        """

    @abstractmethod
    def play(self, key: CellKey, sessions: Sequence[Session], on_answer: OnAnswer) -> Cell:
        """
        Raises:
            ServerError, httpx.HTTPError, ValueError: the arm can no longer answer.
        """

    def lost(self, cell: Cell) -> str:
        """Why the arm cannot continue after this cell; "" if it can."""
        return "" if any(not record.failure for record in cell.records) else _first_failure(cell)

    def tie_gap(self) -> float:
        """The largest difference of two logits that counts as a tie, for the target's dtype."""
        return 0.0

    def gap(self) -> Gap | None:
        """A function that asks the target for logits where two answers differ; None if the arm has none."""
        return None


@contextmanager
def driver_up(
    arm: Arm, plan: Plan, renderer: Renderer, log: Path, on_wait: Callable[[float], None]
) -> Iterator[Driver]:
    """
    Raises:
        ServerError: the arm does not start.
    """
    if arm.engine == "transformers":
        with transformers_up(arm, log, plan.start_s, plan.stall_s) as process:
            yield TransformersDriver(process, plan, renderer)
        return
    with arm.up(log, plan.start_s, on_wait) as (url, server):
        yield ServerDriver(arm, url, server, plan, renderer)


class ServerDriver(Driver):
    """Sends requests to a server over HTTP."""

    def __init__(self, arm: Arm, url: str, server: Server | None, plan: Plan, renderer: Renderer) -> None:
        self._server = server
        self._plan = plan
        self._renderer = renderer
        self._url = url
        self._engine = detect_engine(url) if arm.engine == "other" else arm.engine
        self._radix = arm.radix
        self._key = os.environ.get("OPENAI_API_KEY") if arm.url else None
        self._stalled = ""

    def warm_up(self) -> None:
        sessions = next(iter(self._plan.datasets.values()))
        short = [Session(session.id, session.turns[:1], session.template, session.input_ids) for session in sessions]
        sampling = Sampling(WARM_TOKENS)
        most = min(len(short), round(max(self._plan.loads))) if self._plan.workload != "open-loop" else 1
        for load in sorted({1, most, *(round(load) for load in self._plan.loads if load <= most)}):
            played, _ = asyncio.run(self._ask(short[:load], sampling, load, lambda record: None, "closed"))
            if all(record.failure for record in played.records):
                raise ServerError(played.records[0].failure)

    def play(self, key: CellKey, sessions: Sequence[Session], on_answer: OnAnswer) -> Cell:
        played, acceptance = asyncio.run(
            self._ask(sessions, self._plan.sampling, key.load, on_answer, self._plan.workload)
        )
        self._stalled = played.stalled
        acceptance = total_acceptance(played.records) or acceptance
        return Cell(key, played.records, played.wall_s, acceptance, unasked=played.unasked)

    async def _ask(
        self, sessions: Sequence[Session], sampling: Sampling, load: float, on_answer: OnAnswer, workload: str
    ) -> tuple[Played, Acceptance | None]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        async with Endpoint(self._url, self._engine, self._plan.stall_s, headers) as endpoint:
            self.flushes = await endpoint.flush() or not self._radix
            before = await endpoint.metrics() if self._engine == "vllm" else ""
            player = Player(endpoint, self._renderer, sampling, on_answer)
            if workload == "open-loop":
                played = await player.open_loop(sessions, load, self._plan.seed)
            else:
                played = await player.closed(sessions, round(load))
            after = await endpoint.metrics() if self._engine == "vllm" else ""
            return played, acceptance_between(before, after)

    def lost(self, cell: Cell) -> str:
        broken = any(record.failure for record in cell.records)
        if self._server is not None and self._server.ended(ENDING_S if broken else 0.0):
            return f"the server ended: {self._server.last_words()}"
        return self._stalled or super().lost(cell)

    def tie_gap(self) -> float:
        return Tolerance.of(ServerInfo.ask(Client(self._url)).dtype).tie_gap

    def gap(self) -> Gap | None:
        return sglang_gap(Client(self._url)) if self._engine == "sglang" else None


class TransformersDriver(Driver):
    """Sends batches to the transformers process."""

    def __init__(self, process: TransformersProcess, plan: Plan, renderer: Renderer) -> None:
        self._process = process
        self._plan = plan
        self._renderer = renderer

    def warm_up(self) -> None:
        sessions = next(iter(self._plan.datasets.values()))
        play_batches(self._process, self._renderer, sessions[:1], 1, Sampling(WARM_TOKENS), lambda record: None)

    def play(self, key: CellKey, sessions: Sequence[Session], on_answer: OnAnswer) -> Cell:
        played: Played = play_batches(
            self._process, self._renderer, sessions, round(key.load), self._plan.sampling, on_answer
        )
        return Cell(key, played.records, played.wall_s, total_acceptance(played.records))


def detect_engine(url: str) -> str:
    """The engine that answers at `url`, recognized by its endpoints: sglang, vllm or other."""
    for engine, path in (("sglang", "/server_info"), ("vllm", "/version")):
        try:
            if httpx.get(f"{url}{path}", timeout=10.0).status_code == 200:
                return engine
        except (httpx.HTTPError, httpx.InvalidURL):
            return "other"
    return "other"


def _first_failure(cell: Cell) -> str:
    return cell.records[0].failure if cell.records else "no request was sent"

"""Plays a cell on an arm: over HTTP against a server, or in batches in the transformers process."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_dflash.bench.equality import Gap
from sglang_dflash.bench.plan import Plan
from sglang_dflash.bench.records import Cell, CellKey, Record, total_acceptance
from sglang_dflash.serving import Arm, Server, ServerError, ServerInfo, TiePolicy
from sglang_dflash.serving.batches import TransformersProcess
from sglang_dflash.serving.counters import acceptance_between, prefilled_between
from sglang_dflash.serving.endpoint import Endpoint, Sampling
from sglang_dflash.serving.info import detect_engine
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.server import RunningServer
from sglang_dflash.serving.sessions import Session
from sglang_dflash.serving.traffic import Played, Player, prompt_of

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

    def tie_policy(self) -> TiePolicy:
        """Which differences rounding explains, for the target's dtype."""
        return TiePolicy(0.0)

    def gap(self) -> Gap | None:
        """A function that asks the target for logits where two answers differ; None if the arm has none."""
        return None


class ServerDriver(Driver):
    """Sends requests to a server over HTTP."""

    def __init__(self, arm: Arm, server: Server | RunningServer, plan: Plan, renderer: Renderer) -> None:
        self._server = server
        self._plan = plan
        self._renderer = renderer
        self._engine = detect_engine(server.url) if arm.engine == "other" else arm.engine
        self._radix = arm.radix
        self._key = os.environ.get("OPENAI_API_KEY") if arm.url else None
        self._stalled = ""

    def warm_up(self) -> None:
        sessions = next(iter(self._plan.datasets.values()))
        short = [replace(session, turns=session.turns[:1]) for session in sessions]
        sampling = Sampling(WARM_TOKENS)
        loads = {1}
        if not self._plan.open_loop:
            most = min(len(short), round(max(self._plan.loads)))
            loads |= {most, *(round(load) for load in self._plan.loads if load <= most)}
        for load in sorted(loads):
            played, *_ = asyncio.run(self._ask(short[:load], sampling, load, lambda record: None, False))
            if all(record.failure for record in played.records):
                raise ServerError(played.records[0].failure)

    def play(self, key: CellKey, sessions: Sequence[Session], on_answer: OnAnswer) -> Cell:
        played, before, after = asyncio.run(
            self._ask(sessions, self._plan.sampling, key.load, on_answer, self._plan.open_loop)
        )
        self._stalled = played.stalled
        acceptance, prefilled = total_acceptance(played.records), None
        if self._engine == "vllm":
            acceptance = acceptance or acceptance_between(before, after)
        elif self._engine == "sglang":
            prefilled = prefilled_between(before, after)
        return Cell(key, played.records, played.wall_s, acceptance, prefilled=prefilled, unasked=played.unasked)

    async def _ask(
        self, sessions: Sequence[Session], sampling: Sampling, load: float, on_answer: OnAnswer, open_loop: bool
    ) -> tuple[Played, str, str]:
        """What was played, and the server's counters before and after."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else None
        async with Endpoint(self._server.url, self._engine, self._plan.stall_s, headers) as endpoint:
            self.flushes = await endpoint.flush() or not self._radix
            before = await endpoint.counters()
            player = Player(endpoint, self._renderer, sampling, on_answer)
            if open_loop:
                played = await player.open_loop(sessions, load, self._plan.seed)
            else:
                played = await player.closed(sessions, round(load))
            return played, before, await endpoint.counters()

    def lost(self, cell: Cell) -> str:
        broken = any(record.failure for record in cell.records)
        if self._server.ended(ENDING_S if broken else 0.0):
            return f"the server ended: {self._server.last_words()}"
        return self._stalled or super().lost(cell)

    def tie_policy(self) -> TiePolicy:
        return TiePolicy.of(ServerInfo.ask(self._server.client()).dtype)

    def gap(self) -> Gap | None:
        return self._server.client().logit_gap if self._engine == "sglang" else None


class TransformersDriver(Driver):
    """Sends static batches of `load` prompts to the transformers process: the first turn of every session."""

    def __init__(self, process: TransformersProcess, plan: Plan, renderer: Renderer) -> None:
        self._process = process
        self._plan = plan
        self._renderer = renderer

    def warm_up(self) -> None:
        sessions = next(iter(self._plan.datasets.values()))
        self._ask(sessions[:1], 1, Sampling(WARM_TOKENS), lambda record: None)

    def play(self, key: CellKey, sessions: Sequence[Session], on_answer: OnAnswer) -> Cell:
        records, wall_s = self._ask(sessions, round(key.load), self._plan.sampling, on_answer)
        return Cell(key, records, wall_s, total_acceptance(records))

    def _ask(
        self, sessions: Sequence[Session], batch: int, sampling: Sampling, on_answer: OnAnswer
    ) -> tuple[list[Record], float]:
        """The answers, and the seconds that they took."""
        prompts = [prompt_of(session, session.turns[0].messages, self._renderer) for session in sessions]
        records: list[Record] = []
        begin = time.perf_counter()
        for first in range(0, len(sessions), batch):
            start_s = time.perf_counter() - begin
            replies = self._process.generate(prompts[first : first + batch], sampling, start_s)
            for session, reply in zip(sessions[first : first + batch], replies, strict=True):
                text = "".join(self._renderer.text(token) for token in reply.ids)
                records.append(Record.of(session.id, 0, reply, text))
                on_answer(records[-1])
        return records, time.perf_counter() - begin


def _first_failure(cell: Cell) -> str:
    return cell.records[0].failure if cell.records else "no request was sent"

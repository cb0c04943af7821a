"""Plays sessions against an endpoint: a fixed number at a time (closed), or with random arrivals (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from sglang_dflash.serving.completion import Completion
from sglang_dflash.serving.endpoint import Chat, Endpoint, Sampling
from sglang_dflash.serving.errors import sentence
from sglang_dflash.serving.records import Record
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.sessions import Message, Session, as_openai


@dataclass(slots=True)
class Played:
    """The result of playing sessions.

    Fields:
        records: in the order of the sessions and their turns.
        wall_s: seconds from the first request sent to the last token received.
        unasked: number of turns that were left out because the context was full.
        stalled: why the server was given up, or "": no stream got data for a while.
    """

    records: list[Record] = field(default_factory=list)
    wall_s: float = 0.0
    unasked: int = 0
    stalled: str = ""


class Player:
    """Plays the sessions of one cell."""

    def __init__(
        self,
        endpoint: Endpoint,
        renderer: Renderer,
        sampling: Sampling,
        on_answer: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._endpoint = endpoint
        self._renderer = renderer
        self._sampling = sampling
        self._on_answer = on_answer
        self._begin = 0.0
        self._stalled = ""

    async def closed(self, sessions: Sequence[Session], concurrency: int) -> Played:
        """Plays all sessions, `concurrency` at a time; the next one starts as soon as one ends."""
        waiting = iter(enumerate(sessions))

        async def worker(play: Callable[[int, Session], Awaitable[None]]) -> None:
            for index, session in waiting:
                if self._stalled:
                    return
                await play(index, session)

        return await self._run(sessions, lambda play: [worker(play) for _ in range(concurrency)])

    async def open_loop(self, sessions: Sequence[Session], rate: float, seed: int) -> Played:
        """Starts sessions as a Poisson process of `rate` per second, at the same times for every arm."""
        gaps = random.Random(seed)
        starts, at = [], 0.0
        for _ in sessions:
            starts.append(at)
            at += gaps.expovariate(rate)

        async def late(play: Callable[[int, Session], Awaitable[None]], index: int) -> None:
            await asyncio.sleep(max(0.0, self._begin + starts[index] - time.perf_counter()))
            if not self._stalled:
                await play(index, sessions[index])

        return await self._run(sessions, lambda play: [late(play, index) for index in range(len(sessions))])

    async def _run(
        self,
        sessions: Sequence[Session],
        workers: Callable[[Callable[[int, Session], Awaitable[None]]], list[Awaitable[None]]],
    ) -> Played:
        played = Played()
        by_session: list[list[Record]] = [[] for _ in sessions]
        firsts = [prompt_of(session, _after(session, 0, []), self._renderer) for session in sessions]

        async def play(index: int, session: Session) -> None:
            await self._play(session, firsts[index], by_session[index], played)

        if any(session.tools for session in sessions):
            self._endpoint.open_chats()
        self._begin = time.perf_counter()
        await asyncio.gather(*workers(play))
        played.stalled = self._stalled
        played.records = [record for records in by_session for record in records]
        if played.records:
            played.wall_s = max(r.end_s for r in played.records) - min(r.start_s for r in played.records)
        return played

    async def _play(self, session: Session, first: list[int], records: list[Record], played: Played) -> None:
        messages: list[Message] = []
        for number, turn in enumerate(session.turns):
            messages = _after(session, number, messages)
            if turn.think_s:
                await asyncio.sleep(turn.think_s)
            prompt = first
            if number:
                try:  # in a thread: rendering a long chat takes milliseconds, and other streams must not wait for it
                    prompt = await asyncio.to_thread(prompt_of, session, messages, self._renderer)
                except ValueError as error:  # an answer of this session does not fit into the template
                    records.append(self._refused(session, number, sentence(error)))
                    return
            if number and self._endpoint.context and len(prompt) >= self._endpoint.context:
                played.unasked += len(session.turns) - number
                return
            chat = None
            if session.tools:
                template = {**self._renderer.template, **session.template}
                chat = Chat(as_openai(messages), session.tools, template)
            reply = await self._endpoint.ask(prompt, self._sampling, self._begin, chat)
            record = Record.of(session.id, number, reply)
            records.append(record)
            self._on_answer(record)
            if record.failure:
                self._stalled = self._stalled or (record.failure if self._endpoint.stalled else "")
                return
            messages = [*messages, _answer(record)]

    def _refused(self, session: Session, number: int, why: str) -> Record:
        now = time.perf_counter() - self._begin
        record = Record.of(session.id, number, Completion(start_s=now, end_s=now, failure=why))
        self._on_answer(record)
        return record


def prompt_of(session: Session, messages: Sequence[Message], renderer: Renderer) -> list[int]:
    """The prompt for the next answer to `messages`, as token ids."""
    if session.text:
        return renderer.plain(session.text)
    return list(session.input_ids) or renderer(as_openai(messages), session.template, session.tools)


def prompts_of(sessions: Sequence[Session], records: Sequence[Record], renderer: Renderer) -> dict[str, list[int]]:
    """The prompt of each answered record, by record id, rebuilt from the earlier answers of its session.

    Args:
        records: of one cell; a session's turns in order.
    """
    by_session: dict[str, list[Record]] = {}
    for record in records:
        by_session.setdefault(record.session, []).append(record)
    prompts = {}
    for session in sessions:
        messages: list[Message] = []
        for record in by_session.get(session.id, []):
            if record.failure:  # the session's last record
                break
            messages = _after(session, record.turn, messages)
            prompts[record.id] = prompt_of(session, messages, renderer)
            messages = [*messages, _answer(record)]
    return prompts


def _answer(record: Record) -> Message:
    return Message("assistant", record.text, tuple(record.calls))


def _after(session: Session, number: int, messages: Sequence[Message]) -> list[Message]:
    """The chat after turn `number` has edited it and added its messages."""
    turn = session.turns[number]
    edits = {edit.index: edit.content for edit in turn.edits}
    edited = [replace(m, content=edits.get(index, m.content)) for index, m in enumerate(messages)]
    return [*edited, *turn.messages]

"""Playing sessions: order, history, edits, pauses, arrivals."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from fakes import render

from sglang_dflash.serving import Completion
from sglang_dflash.serving.endpoint import Endpoint, Sampling
from sglang_dflash.serving.sessions import Edit, Message, Session, Turn
from sglang_dflash.serving.traffic import Player, prompts_of


class FakeEndpoint:
    """Answers after `seconds`, and records prompts and concurrency."""

    def __init__(self, context: int = 0, seconds: float = 0.01, fail: str = "") -> None:
        self.context = context
        self._seconds = seconds
        self._fail = fail
        self.stalled = False
        self.asked: list[list[int]] = []
        self.under_way = self.most = 0

    async def ask(self, prompt: list[int], sampling: Sampling, begin: float, chat: object = None) -> Completion:
        self.asked.append(prompt)
        number = text(prompt).count("assistant:")
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        start = time.perf_counter() - begin
        await asyncio.sleep(self._seconds)
        self.under_way -= 1
        end = time.perf_counter() - begin
        times = {"start_s": start, "first_s": end, "end_s": end}
        failure = "refused" if self._fail and self._fail in text(prompt) else ""
        return Completion([1], f"answer {number}", {"type": "stop"}, len(prompt), 1, **times, failure=failure)


def text(prompt: list[int]) -> str:
    return "".join(map(chr, prompt))


SESSION = Session(
    "s",
    (
        Turn((Message("system", "rules"), Message("user", "task"))),
        Turn((Message("user", "tool result"),), think_s=0.2),
        Turn((Message("user", "go on"),), edits=(Edit(3, "[removed]"),)),
    ),
)


def test_a_session_is_asked_with_its_history():
    """Fails where an answer, a new message or an edit is missing or in the wrong place."""
    endpoint = FakeEndpoint()
    played = asyncio.run(Player(endpoint, render, Sampling(4)).closed([SESSION], 1))
    assert [text(prompt) for prompt in endpoint.asked] == [
        "system:rules\nuser:task\n",
        "system:rules\nuser:task\nassistant:answer 0\nuser:tool result\n",
        "system:rules\nuser:task\nassistant:answer 0\nuser:[removed]\nassistant:answer 1\nuser:go on\n",
    ]
    # The pause before the second turn counts for the cell, but not for a request.
    first, second, _ = played.records
    assert second.start_s - first.end_s >= 0.19  # the clocks differ by a fraction of a millisecond
    assert list(prompts_of([SESSION], played.records, render).values()) == endpoint.asked


def test_a_chat_that_the_template_refuses_ends_its_session_alone():
    """Fails where an answer that the chat template cannot render ends the whole cell, or goes unseen."""

    def picky(messages, *rest):
        if any("tool result" in message["content"] for message in messages):
            raise ValueError("a tool's result\nwithout a call")
        return render(messages, *rest)

    endpoint, other = FakeEndpoint(), Session.of_texts("other", ["x", "y"])
    played = asyncio.run(Player(endpoint, picky, Sampling(4)).closed([SESSION, other], 1))
    assert [record.id for record in played.records] == ["s/0", "s/1", "other/0", "other/1"]
    assert [record.failure for record in played.records] == ["", "a tool's result without a call", "", ""]
    assert list(prompts_of([SESSION, other], played.records, picky)) == ["s/0", "other/0", "other/1"]


def test_so_many_sessions_are_in_flight():
    """Fails where more sessions than `concurrency` run at once, or fewer while others wait."""
    endpoint = FakeEndpoint()
    sessions = [Session.of_texts(f"s{i}", ["x"]) for i in range(9)]
    played = asyncio.run(Player(endpoint, render, Sampling(4)).closed(sessions, 3))
    assert endpoint.most == 3
    assert [record.session for record in played.records] == [session.id for session in sessions]


def test_a_failed_turn_ends_its_session():
    """Fails where a session continues without an answer in its history, or other sessions stop, too."""
    endpoint = FakeEndpoint(fail="tool result")
    played = asyncio.run(Player(endpoint, render, Sampling(4)).closed([SESSION, Session.of_texts("t", ["x"])], 1))
    assert [record.id for record in played.records] == ["s/0", "s/1", "t/0"]


def test_a_session_ends_where_the_context_does():
    """Fails where a turn is sent although it does not fit, or the unsent turns are not counted."""
    endpoint = FakeEndpoint(context=50)
    played = asyncio.run(Player(endpoint, render, Sampling(4)).closed([SESSION], 1))
    assert (len(played.records), played.unasked) == (1, 2)


def test_a_connection_that_breaks_while_it_is_made_is_a_failed_request(monkeypatch):
    """Fails where a server that ends at that moment ends the benchmark; anyio then asks None for the peer's name."""

    async def ask():
        endpoint = Endpoint("http://127.0.0.1:1", "sglang", 9.0)
        monkeypatch.setattr(endpoint._http, "stream", lambda *_, **__: None.getpeername())
        return await endpoint.ask([5], Sampling(4), 0.0)

    assert "closed the connection" in asyncio.run(ask()).failure


def test_turns_go_on_in_an_open_loop():
    """Fails where a turn waits for other sessions, keeps no pause, or starts as if it were an arrival of its own."""
    endpoint = FakeEndpoint(seconds=0.05)
    sessions = [replace(SESSION, id=f"s{i}") for i in range(3)]
    records = asyncio.run(Player(endpoint, render, Sampling(4)).open_loop(sessions, 50.0, seed=3)).records
    assert [record.id for record in records] == [f"s{i}/{turn}" for i in range(3) for turn in range(3)]
    for first, second, third in (records[place : place + 3] for place in (0, 3, 6)):
        assert second.start_s - first.end_s >= 0.19 and third.start_s >= second.end_s
    assert records[6].start_s < records[2].start_s  # the last session starts before the first one ends


def test_arrivals_are_poisson_and_the_same_for_every_arm():
    """Fails where requests wait for each other, the rate is wrong, or two arms get different arrival times."""
    sessions = [Session.of_texts(f"s{i}", ["x"]) for i in range(60)]
    starts = []
    for _ in range(2):
        endpoint = FakeEndpoint(seconds=0.2)
        played = asyncio.run(Player(endpoint, render, Sampling(4)).open_loop(sessions, 100.0, seed=3))
        starts.append([record.start_s for record in played.records])
        assert endpoint.most > 8
    assert max(abs(a - b) for a, b in zip(*starts, strict=True)) < 0.05
    assert 0.3 < starts[0][-1] < 1.0  # 60 arrivals at 100 per second
    gaps = [b - a for a, b in zip(starts[0], starts[0][1:], strict=False)]
    assert max(gaps) > 3 * sorted(gaps)[len(gaps) // 2]  # not evenly spaced

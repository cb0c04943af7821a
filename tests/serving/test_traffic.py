"""Playing sessions: order, history, pauses, failures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock
from typing import Any

import pytest

from sglang_dflash.serving import Completion, ServerError
from sglang_dflash.serving.endpoint import Sampling
from sglang_dflash.serving.sessions import Message, Session, Turn
from sglang_dflash.serving.traffic import play, prompted

SESSION = Session(
    "s",
    (
        Turn((Message("system", "rules"), Message("user", "task"))),
        Turn((Message("user", "tool result"),)),
        Turn((Message("user", "go on"),)),
    ),
)


def render(messages: Sequence[dict[str, Any]], template: dict[str, object]) -> list[int]:
    return [ord(letter) for message in messages for letter in f"{message['role']}:{message['content']}\n"]


def text(prompt: list[int]) -> str:
    return "".join(map(chr, prompt))


class FakeEndpoint:
    """Answers after 10 ms, and records prompts and concurrency."""

    def __init__(self, context: int = 0, fail: str = "", lost: str = "") -> None:
        self.context, self._fail, self._lost = context, fail, lost
        self.asked: list[list[int]] = []
        self.under_way = self.most = 0
        self._lock = Lock()

    def ask(self, prompt: list[int], sampling: Sampling, begin: float) -> Completion:
        start = time.perf_counter() - begin
        with self._lock:
            self.asked.append(list(prompt))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        time.sleep(0.01)
        with self._lock:
            self.under_way -= 1
        if self._lost and self._lost in text(prompt):
            raise ServerError("it is lost")
        times = {"start_s": start, "first_s": start, "end_s": time.perf_counter() - begin}
        failure = "refused" if self._fail and self._fail in text(prompt) else ""
        answer = f"answer {text(prompt).count('assistant:')}"
        return Completion([1], answer, {"type": "stop"}, len(prompt), 1, **times, failure=failure)


def played(endpoint: FakeEndpoint, *sessions: Session, at_once: int = 1, renderer: Any = render, **how: Any) -> list:
    return play(endpoint, renderer, sessions, at_once, Sampling(4), **how)


def test_a_session_is_asked_with_its_history() -> None:
    """Fails where an answer or a new message is missing or in the wrong place, or prompts are not made again alike."""
    endpoint = FakeEndpoint()
    records = played(endpoint, SESSION)
    assert [text(prompt) for prompt in endpoint.asked] == [
        "system:rules\nuser:task\n",
        "system:rules\nuser:task\nassistant:answer 0\nuser:tool result\n",
        "system:rules\nuser:task\nassistant:answer 0\nuser:tool result\nassistant:answer 1\nuser:go on\n",
    ]
    assert prompted([SESSION], records, render) == list(zip(records, endpoint.asked, strict=True))


def test_pauses_are_those_of_the_session() -> None:
    """Fails where there is no pause before a later turn, or another in the next run."""
    gaps = []
    for _ in range(2):
        first, second, third = played(FakeEndpoint(), SESSION, think_s=0.1)
        gaps.append([second.start_s - first.end_s, third.start_s - second.end_s])
    assert first.start_s < 0.05 and sum(gaps[0]) > 0.05
    assert gaps[0] == pytest.approx(gaps[1], abs=0.05)


def test_so_many_sessions_are_in_flight() -> None:
    """Fails where more sessions than `at_once` run at once, or fewer while others wait, or an answer is not told."""
    endpoint, sessions, told = FakeEndpoint(), [Session.of_texts(f"s{i}", ["x"]) for i in range(9)], []
    records = played(endpoint, *sessions, at_once=3, on_answer=lambda: told.append(1))
    assert endpoint.most == 3 and len(told) == 9
    assert [record.session for record in records] == [session.id for session in sessions]


def test_a_failed_turn_ends_its_session_alone() -> None:
    """Fails where a session continues without an answer, other sessions stop, too, or a chat that the template refuses
    ends all."""

    def picky(messages: Sequence[dict[str, Any]], template: dict[str, object]) -> list[int]:
        if any("tool result" in message["content"] for message in messages):
            raise ValueError("a tool's result\nwithout a call")
        return render(messages, template)

    other = Session.of_texts("other", ["x", "y"])
    for renderer, said in ((render, "refused"), (picky, "a tool's result without a call")):
        records = played(FakeEndpoint(fail="tool result"), SESSION, other, renderer=renderer)
        assert [record.id for record in records] == ["s/0", "s/1", "other/0", "other/1"]
        assert [record.failure for record in records] == ["", said, "", ""]
        assert [record.id for record, _ in prompted([SESSION, other], records, renderer)] == [
            "s/0",
            "other/0",
            "other/1",
        ]


def test_a_full_context_ends_a_session() -> None:
    """Fails where a prompt as long as the context is sent."""
    assert [record.id for record in played(FakeEndpoint(context=50), SESSION)] == ["s/0"]


def test_a_lost_server_is_not_asked_again() -> None:
    """Fails where every session waits for a server that sends nothing."""
    endpoint = FakeEndpoint(lost="x")
    with pytest.raises(ServerError, match="it is lost"):
        played(endpoint, *(Session.of_texts(f"s{i}", ["x", "y"]) for i in range(50)))
    assert len(endpoint.asked) < 5

"""The example agent calls its tools as the model asks, survives bad calls, and ends with the model's answer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    pytest.importorskip("openai")
    spec = importlib.util.spec_from_file_location("agent", Path(__file__).parents[2] / "examples" / "agent.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ScriptedClient:
    """Answers like an OpenAI client, with the given messages in turn; keeps what it was asked."""

    def __init__(self, *answers: str | tuple[str, dict[str, str]]) -> None:
        from openai.types.chat import ChatCompletionMessage

        self.asked: list[list[dict[str, Any]]] = []
        self._answers = iter(answers)
        self._message = ChatCompletionMessage
        self.models = SimpleNamespace(list=lambda: SimpleNamespace(data=[SimpleNamespace(id="m")]))
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def _create(self, messages: list[dict[str, Any]], **_: Any) -> Any:
        self.asked.append([dict(message) for message in messages])
        answer = next(self._answers)
        said: dict[str, Any] = {"role": "assistant", "content": answer if isinstance(answer, str) else None}
        if not isinstance(answer, str):
            function = {"name": answer[0], "arguments": json.dumps(answer[1])}
            said["tool_calls"] = [{"id": f"call-{len(self.asked)}", "type": "function", "function": function}]
        return SimpleNamespace(choices=[SimpleNamespace(message=self._message.model_validate(said))])


def results(client: ScriptedClient) -> list[str]:
    return [message["content"] for message in client.asked[-1] if message["role"] == "tool"]


def test_it_computes_and_saves(agent: ModuleType, tmp_path: Path) -> None:
    """Fails where a tool is not run, or its result does not reach the model under the call's id."""
    calls = [("calculate", {"expression": "12 * 7 + 30"}), ("write_file", {"path": "a.txt", "text": "114"})]
    client = ScriptedClient(*calls, ("read_file", {"path": "a.txt"}), "It is 114.")
    assert agent.run(client, "Do it.", tmp_path) == "It is 114."
    assert results(client) == ["114", "saved", "114"] and (tmp_path / "a.txt").read_text() == "114"
    called = [message["tool_calls"][0]["id"] for message in client.asked[-1] if message["role"] == "assistant"]
    assert called == [message["tool_call_id"] for message in client.asked[-1] if message["role"] == "tool"]


@pytest.mark.parametrize(
    "call",
    [
        ("calculate", {"expression": "open('a')"}),
        ("calculate", {"expression": "1 //"}),
        ("calculate", {"expression": "1 // 0"}),
        ("calculate", {"formula": "1"}),
        ("read_file", {"path": "missing.txt"}),
        ("write_file", {"path": "../outside.txt", "text": "x"}),
        ("delete_all", {}),
    ],
    ids=str,
)
def test_a_bad_call_is_an_error_that_the_model_reads(
    agent: ModuleType, tmp_path: Path, call: tuple[str, dict[str, str]]
) -> None:
    """Fails where a bad call ends the agent, runs code, or leaves the store's folder."""
    store = tmp_path / "store"
    store.mkdir()
    client = ScriptedClient(call, "I cannot.")
    assert agent.run(client, "Do it.", store) == "I cannot."
    assert results(client)[0].startswith("error: ") and list(tmp_path.iterdir()) == [store]


def test_an_agent_that_never_answers_ends(agent: ModuleType, tmp_path: Path) -> None:
    """Fails where a model that only calls tools keeps the agent busy for ever."""
    client = ScriptedClient(*[("calculate", {"expression": "1 + 1"})] * 20)
    with pytest.raises(SystemExit, match="not done after 8 steps"):
        agent.run(client, "Do it.", tmp_path)

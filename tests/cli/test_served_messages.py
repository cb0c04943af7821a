"""Messages and tools of training data are, for the chat template, those of SGLang's own server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import _GENERIC_MESSAGE_ROLES, ChatCompletionMessageGenericParam, Tool
from sglang.srt.entrypoints.openai.serving_chat import normalize_assistant_tool_call_arguments

from sglang_dflash.serving.messages import ROLES, messages_of, tools_of

ASKED = {"role": "user", "content": "What is in a.txt?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "63"}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
RUN = {"type": "function", "function": {"description": "Runs it.", "name": "run", "parameters": {"type": "object"}}}


def calling(name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    "message",
    [
        calling("read", '{"path": "a.txt", "deep": {"b": [1, null]}}'),
        calling("read", {"path": "a.txt"}),
        {**calling("read", "{}"), "content": "I look.", "reasoning_content": "Where?"},
        {key: value for key, value in calling("read", "{}").items() if key != "content"},
        {"role": "assistant", "content": "Done.", "tool_calls": None, "name": None},
        {"role": "assistant", "content": "Done.", "tool_calls": []},
        {**RESULT, "name": "read", "unknown": 3},
    ],
)
def test_a_message_is_what_sglang_renders(message):
    """Fails if the template gets other fields or values than SGLang's own server gives it."""
    dumped = ChatCompletionMessageGenericParam(**message).model_dump()
    normalize_assistant_tool_call_arguments(dumped)
    dumped["content"] = dumped["content"] or ""
    *_, ours = messages_of({"messages": [ASKED, message]})
    assert ours == {key: value for key, value in dumped.items() if value is not None}
    assert json.dumps(ours.get("tool_calls")) == json.dumps(dumped["tool_calls"])  # a template prints them in order


def test_roles_are_those_that_sglang_takes():
    """Fails if a role that SGLang's server refuses is trained on, or one that it takes is refused."""
    assert {*ROLES} == {*_GENERIC_MESSAGE_ROLES, "user"}


@pytest.mark.parametrize(
    "tool",
    [READ, RUN, {"function": {"strict": None, "name": "a", "x": 1}}, {"function": {"strict": True, "name": "a"}}],
)
def test_a_tool_is_what_sglang_renders(tool):
    """Fails if a template that prints a tool prints another text than on SGLang's own server."""
    (ours,) = tools_of({"tools": [tool]})["tools"]
    assert json.dumps(ours) == json.dumps(Tool(**tool).model_dump())

"""One row's conversation as SGLang gives it to the chat template: messages, tool calls, tool results and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

_FROM = {"human": "user", "gpt": "assistant"}
# What a message may have besides role, content and tool_calls; SGLang reads nothing else, and none of it of users.
_MORE = ("tool_call_id", "name", "reasoning_content")
_OF_A_FUNCTION = ("name", "description", "parameters", "strict")
_FORMS = (
    '"messages": [{"role", "content"}], "conversations": [{"from", "value"}], "prompt" and "response", or '
    '"input_ids" and "spans"'
)


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation of one JSONL object.

    An assistant turn with `tool_calls` may have no content, which becomes "". Arguments become objects.

    Raises:
        ValueError: it has none of the known forms, no user turn, or a turn that is malformed.
    """
    turns: list[Mapping[str, Any]]
    if row.get("messages"):
        turns = _objects(row["messages"], "its turns")
    elif row.get("conversations"):
        shared = _objects(row["conversations"], "its turns")
        turns = [
            {"role": _FROM.get(str(turn.get("from")), turn.get("from")), "content": turn.get("value")}
            for turn in shared
        ]
    elif row.get("prompt") is not None:
        turns = [{"role": "user", "content": row["prompt"]}]
        turns += [{"role": "assistant", "content": row["response"]}] if row.get("response") is not None else []
    else:
        raise ValueError(f"it has the keys {sorted(row)}; it must have {_FORMS}.")
    if row.get("system"):
        turns = [{"role": "system", "content": row["system"]}, *turns]
    messages = as_served(turns)
    first_user = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    if first_user == len(messages):
        raise ValueError("it has no user turn.")
    # Assistant turns before the first user turn (ShareGPT has such rows) answer no question: they are dropped.
    answers = ("assistant", "tool")
    return [message for i, message in enumerate(messages) if i >= first_user or message["role"] not in answers]


def as_served(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as SGLang gives them to the chat template.

    Raises:
        ValueError: one of them is malformed.
    """
    return [_message(turn) for turn in turns]


def tools_of(row: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The row's `tools` in OpenAI's form, as keyword arguments of the chat template: {"tools": ...}, or {} without.

    SGLang names `description` and `parameters` of a function and `defer_loading` of a tool even if they are absent, and
    most templates print the whole object.

    Raises:
        ValueError: they are not a list of objects with a `function` that has a `name`.
    """
    if not row.get("tools"):
        return {}
    tools = []
    for tool in _objects(row["tools"], "its tools"):
        function = _function(tool, "each of its tools")
        given = {key: value for key, value in function.items() if key in _OF_A_FUNCTION}
        if given.get("strict", 0) is None:
            del given["strict"]
        absent = {key: None for key in ("description", "parameters") if key not in given}
        tools.append({"type": tool.get("type", "function"), "function": {**given, **absent}, "defer_loading": None})
    return {"tools": tools}


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], asks: bool, **template: Any) -> str:
    """The text of a conversation.

    Args:
        asks: whether the text ends where the next answer begins.
        template: keyword arguments of the chat template, `tools` among them.

    Raises:
        ValueError: the chat template refuses this conversation.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **template)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from None


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    role, content = turn.get("role"), turn.get("content")
    calls = turn.get("tool_calls") if role == "assistant" else None
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(
            "every turn must have a role and a content, both text; only a turn of the assistant with tool_calls needs "
            "no content."
        )
    message: dict[str, Any] = {"role": role, "content": content}
    for key in _MORE if role != "user" else ():
        value = turn.get(key)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"the {key} of a turn is {value!r}; it must be text.")
        message |= {key: value} if value is not None else {}
    if calls is not None:
        message["tool_calls"] = [_call(call) for call in _objects(calls, "the tool_calls of a turn")]
    return message


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = _function(call, "each of the tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = [arguments]  # refused below
    if not isinstance(arguments, dict | None):
        raise ValueError(
            f"the arguments of a call of {function['name']} are {str(function['arguments'])[:80]!r}; they must be a "
            "JSON object."
        )
    named = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": named}


def _function(value: Mapping[str, Any], named: str) -> Mapping[str, Any]:
    function = value.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'{named} must have a "function", an object with a "name".')
    return function


def _objects(value: Any, named: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError(f"{named} must be a list of objects.")
    return value

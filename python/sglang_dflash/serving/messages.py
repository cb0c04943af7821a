"""One row's conversation as SGLang gives it to the chat template: messages, tool calls, tool results and tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from sglang_dflash.serving.rows import check_text

# SGLang's server takes these, in any case.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "latest_reminder", "root")
# What ShareGPT and the trainers that read it call them.
_OTHERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
_OTHERS |= {"observation": "tool", "function_response": "tool"}
# Keys that hold a list of turns.
_LISTS = ("messages", "conversations", "conversation")
# What a message may have besides role, content and tool_calls; SGLang reads nothing else, and none of it of users.
_MORE = ("tool_call_id", "name", "reasoning_content")
_OF_A_FUNCTION = ("name", "description", "parameters", "strict")
_FORMS = (
    '"messages" or "conversations", a list of {"role", "content"} or {"from", "value"}, or "prompt" and "response", or '
    '"input_ids" and "spans" or "loss_mask"'
)


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation of one JSONL object.

    An assistant turn with `tool_calls` may have no content, which becomes "". Arguments become objects. Every list of
    turns may have `from` and `value` instead of `role` and `content`, and the roles of ShareGPT.

    Raises:
        ValueError: it has none of the known forms, no user turn, or a turn that is malformed; names the field.
    """
    turns = _turns(row)
    messages = [_message(turn, field) for field, turn in turns]
    if row.get("system"):
        system = {"role": "system", "content": _text(row, "system")}
        if messages[0]["role"] == "system" and messages[0] != system:
            raise ValueError(f"it has both `system` and {turns[0][0]}, which is another system message.")
        messages = [system, *(messages[1:] if messages[0] == system else messages)]
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
    return [_message(turn, f"messages[{place}]") for place, turn in enumerate(turns)]


def tools_of(row: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The row's `tools` in OpenAI's form, as keyword arguments of the chat template: {"tools": ...}, or {} without.

    SGLang names `description` and `parameters` of a function and `defer_loading` of a tool even if they are absent, and
    most templates print the whole object.

    A text is read as JSON: other trainers write the list so.

    Raises:
        ValueError: they are not a list of objects with a `function` that has a `name`.
    """
    given_tools = row.get("tools")
    if isinstance(given_tools, str) and given_tools:
        try:
            given_tools = json.loads(given_tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"its tools are a text that is not valid JSON: {error}.") from None
    if not given_tools:
        return {}
    check_text(given_tools, "tools")
    tools = []
    for tool in _objects(given_tools, "its tools"):
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


def _turns(row: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The turns of a row, and how errors call each of them."""
    keys = [key for key in _LISTS if row.get(key)][:1]
    if not keys and isinstance(row.get("prompt"), list):
        keys = [key for key in ("prompt", "completion") if row.get(key)]  # TRL's form
    if keys:
        lists = {key: _objects(row[key], f"its {key}") for key in keys}
        return [(f"{key}[{place}]", turn) for key, turns in lists.items() for place, turn in enumerate(turns)]
    if row.get("prompt") is None:
        raise ValueError(f"it has the keys {sorted(row)}; it must have {_FORMS}.")
    turns = [("prompt", {"role": "user", "content": _text(row, "prompt")})]
    if row.get("response") is not None:
        turns.append(("response", {"role": "assistant", "content": _text(row, "response")}))
    return turns


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise ValueError(f"its {key} is {_short(row[key])}; it must be text.")
    check_text(row[key], key)
    return row[key]


def _short(value: Any) -> str:
    return repr(value)[:80]


def _message(turn: Mapping[str, Any], field: str) -> dict[str, Any]:
    by = "from" if turn.get("role") is None and "from" in turn else "role"
    said = "value" if turn.get("content") is None and "value" in turn else "content"
    check_text(turn, field)
    role = str(turn.get(by)).lower()
    role = _OTHERS.get(role, role)
    if role not in ROLES:
        raise ValueError(f"{field}.{by} is {_short(turn.get(by))}; it must be one of {', '.join((*ROLES, *_OTHERS))}.")
    content = turn.get(said)
    calls = turn.get("tool_calls") if role == "assistant" else None
    if content is None and calls:
        content = ""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        # Of several texts, SGLang makes one with or without spaces between them, as the chat template reads them.
        content = content[0].get("text") if content[0].get("type") == "text" else content
    if not isinstance(content, str):
        raise ValueError(
            f"{field}.{said} is {_short(turn.get(said))}; it must be text, or a list of one part of the type text. "
            "Only a turn of the assistant with tool_calls needs none."
        )
    message: dict[str, Any] = {"role": role, "content": content}
    for key in _MORE if role != "user" else ():
        value = turn.get(key)
        if value is None and key == "reasoning_content":
            value = turn.get("thinking")  # as speculators names it
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{field}.{key} is {_short(value)}; it must be text.")
        message |= {key: value} if value is not None else {}
    if calls is not None:
        message["tool_calls"] = [_call(call) for call in _objects(calls, f"{field}.tool_calls")]
    return message


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = _function(call, "each of the tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = [arguments]  # refused below
    check_text(arguments, f"the arguments of a call of {function['name']}")
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

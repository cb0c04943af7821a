"""Sessions of one or more turns, before they are rendered to token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A tool call that the server parsed. `arguments`: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    Fields:
        role: system, user, assistant or tool.
        calls: tool calls of an assistant's message.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces the content of an earlier message, as clients do to shorten or correct it.

    Fields:
        index: index of the message in the session; answers count, too.
        content: the new content.
    """

    index: int
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """The changes before the next request: edits, new messages, a pause.

    Fields:
        messages: appended after the previous turn's answer.
        edits: applied first, to earlier messages.
        think_s: pause between the previous answer and this request, in seconds.
    """

    messages: tuple[Message, ...]
    edits: tuple[Edit, ...] = ()
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Consecutive turns; the server's answers are inserted between them.

    Fields:
        id: unique in its dataset; reports name requests by `id/turn`.
        turns: at least one.
        template: keyword arguments of the chat template, in addition to those of the run.
        input_ids: the prompt of the only turn, if it is given as token ids.
        text: the prompt of the only turn, if it is a text without a chat template.
        tools: as OpenAI's API has them. With tools, the server renders the chat and parses the calls.
    """

    id: str
    turns: tuple[Turn, ...]
    template: dict[str, object] = field(default_factory=dict)
    input_ids: tuple[int, ...] = ()
    text: str = ""
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @classmethod
    def of_texts(cls, id: str, texts: list[str], system: str = "") -> Session:
        """A session whose turns are `texts`, each one user message."""
        first = (Message("system", system),) if system else ()
        turns = [Turn((Message("user", text),)) for text in texts]
        turns[0] = Turn((*first, *turns[0].messages))
        return cls(id, tuple(turns))


def as_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The chat as OpenAI's API has it. A tool result answers the first call of the message before it.

    A call without a result is left out, and a result without a call becomes a user's message, because templates and
    servers may refuse either. A call that was cut, so that its arguments are no JSON object, counts as none.
    """
    chat: list[dict[str, Any]] = []
    call: ToolCall | None = None
    for message, following in zip_longest(messages, messages[1:]):
        role = "user" if message.role == "tool" and call is None else message.role
        made: dict[str, Any] = {"role": role, "content": message.content}
        if role == "tool" and call is not None:
            made["tool_call_id"] = call.id
        answered = following is not None and following.role == "tool"
        call = message.calls[0] if answered and message.calls and _complete(message.calls[0]) else None
        if call is not None:
            function = {"name": call.name, "arguments": call.arguments}
            made["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        chat.append(made)
    return chat


def _complete(call: ToolCall) -> bool:
    try:
        return isinstance(json.loads(call.arguments), dict)
    except json.JSONDecodeError:
        return False

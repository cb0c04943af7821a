"""Sessions of one or more turns, before they are rendered to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. `role`: system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What comes before the next request: messages that are appended after the previous turn's answer."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """Consecutive turns; the server's answers are inserted between them.

    Fields:
        id: unique in its dataset; reports name requests by `id/turn`.
        turns: at least one.
        template: keyword arguments of the chat template, in addition to those of the run.
        input_ids: the prompt of the only turn, if it is given as token ids.
        text: the prompt of the only turn, if it is a text without a chat template.
    """

    id: str
    turns: tuple[Turn, ...]
    template: dict[str, object] = field(default_factory=dict)
    input_ids: tuple[int, ...] = ()
    text: str = ""

    @classmethod
    def of_texts(cls, id: str, texts: list[str], system: str = "") -> Session:
        """A session whose turns are `texts`, each one user message."""
        first = (Message("system", system),) if system else ()
        turns = [Turn((Message("user", text),)) for text in texts]
        turns[0] = Turn((*first, *turns[0].messages))
        return cls(id, tuple(turns))


def as_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The chat as OpenAI's API has it."""
    return [{"role": one.role, "content": one.content} for one in messages]

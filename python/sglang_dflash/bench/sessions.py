"""What is asked: sessions of one or more turns, before they are rendered to token ids."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat. `role`: system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces the content of an earlier message, as clients do that shorten or correct what was said.

    Fields:
        index: of the message, counted from the session's first one; answers count too.
        content: what stands there from now on.
    """

    index: int
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What happens before the server is asked once more: edits, new messages, a pause.

    Fields:
        messages: appended after the former turn's answer.
        edits: applied first, to messages that are there already.
        think_s: pause between the former answer and this request, in seconds.
    """

    messages: tuple[Message, ...]
    edits: tuple[Edit, ...] = ()
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other; the server's answers are put between them.

    Fields:
        id: unique in its dataset; reports name requests by `id/turn`.
        turns: at least one.
        template: keyword arguments of the chat template, beside those of the run.
        input_ids: of the only turn, where a dataset gives token ids and no text.
    """

    id: str
    turns: tuple[Turn, ...]
    template: dict[str, object] = field(default_factory=dict)
    input_ids: tuple[int, ...] = ()

    @classmethod
    def of_texts(cls, id: str, texts: list[str], system: str = "") -> Session:
        """A session whose turns are `texts`, each one user message."""
        first = (Message("system", system),) if system else ()
        turns = [Turn((Message("user", text),)) for text in texts]
        turns[0] = Turn((*first, *turns[0].messages))
        return cls(id, tuple(turns))

"""One request of a session as the client saw it, flat, as results files keep it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from sglang_dflash.serving.completion import Completion

_OF_REPLY = {one.name for one in fields(Completion)}


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are in seconds since its cell began.

    Fields:
        session, turn: id of the session, and index of its turn, 0 first.
        start_s: when the request was sent.
        first_s, end_s: when the first and the last token arrived. `first_s` is None if no token arrived.
        tokens: number of generated tokens, as the server counts them.
        ids: the generated token ids; empty if the server does not report them.
        text: the generated text.
        finish: the server's finish reason; "" if the request failed.
        cached_tokens: prompt tokens from the prefix cache; None if the server does not report them.
        steps: verify steps; 0 without speculation, or if the server does not report them.
        drafted: draft tokens that were verified in those steps.
        accept_histogram: number of steps by accept_len, 0 first.
        failure: why there is no answer; "" if there is one.
    """

    session: str
    turn: int
    start_s: float
    first_s: float | None
    end_s: float
    prompt_tokens: int
    tokens: int
    ids: list[int]
    text: str
    finish: str
    cached_tokens: int | None = None
    steps: int = 0
    drafted: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    failure: str = ""

    @classmethod
    def of(cls, session: str, turn: int, reply: Completion, text: str | None = None) -> Record:
        """`text`: if the reply has none."""
        kept = {field.name: getattr(reply, field.name) for field in fields(cls) if field.name in _OF_REPLY}
        text = reply.text if text is None else text
        return cls(session, turn, **{**kept, "text": text, "finish": reply.finish_reason})

    @property
    def id(self) -> str:
        return f"{self.session}/{self.turn}"

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None if there is only one token, or all arrive at once."""
        if self.first_s is None or self.tokens < 2 or self.end_s == self.first_s:
            return None
        return (self.end_s - self.first_s) / (self.tokens - 1)

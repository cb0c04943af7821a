"""One reply of a server, whichever engine gave it, and the acceptance of drafts over replies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from sglang_dflash.serving.errors import sentence


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """Acceptance of drafts.

    Fields:
        steps: number of verify steps.
        drafted, accepted: numbers of draft tokens.
        by_position: numbers of steps that accepted draft 1, 2, ...
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Mean commit_len: accepted drafts plus the target's own token, per step; 0.0 without steps."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def shares(self) -> list[float]:
        """Share of the steps that accepted draft 1, 2, ...; empty without steps."""
        return [count / self.steps for count in self.by_position] if self.steps else []

    @classmethod
    def of(cls, replies: Iterable[Any]) -> AcceptanceStats:
        """The total of replies.

        Args:
            replies: with `steps`, `drafted` and `accept_histogram`, as a `Completion` has them.
        """
        held = list(replies)
        columns = zip_longest(*(one.accept_histogram for one in held), fillvalue=0)
        histogram = [sum(column) for column in columns]  # steps by accept_len
        return cls(
            steps=sum(one.steps for one in held),
            drafted=sum(one.drafted for one in held),
            accepted=sum(accept_len * count for accept_len, count in enumerate(histogram)),
            by_position=[sum(histogram[position:]) for position in range(1, len(histogram))],
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request got: an answer, a refusal, or a failure.

    Fields:
        ids, text: the answer; no ids if the server does not report them.
        finish: the finish reason in SGLang's form: `type` is "stop", "length" or "abort".
        prompt_tokens, tokens: of prompt and answer, as the server counts them.
        cached_tokens: prompt tokens from the prefix cache; None if the server does not report them.
        logprobs: of `ids`; empty if none were requested.
        best: per token, the most likely (id, logprob) at its position, best first; empty if none were requested.
        steps: verify steps; 0 without speculation, or if the server does not report them.
        drafted: draft tokens that were verified in those steps.
        accept_histogram: verify steps by accept_len, 0 first.
        adapts: the server chose a width per step, so the number of steps does not show how good the drafts were.
        refusal: the server's message if it answered 4xx; there is no answer then.
        failure: why the server failed or aborted the request; a part of the answer may exist.
        start_s, first_s, end_s: of streamed requests, in seconds: sent, first token, last token. `first_s` is None if
            no token came.
        meta: SGLang's whole `meta_info`.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int | None = None
    logprobs: list[float] = field(default_factory=list)
    best: list[list[tuple[int, float]]] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    adapts: bool = False
    refusal: str = ""
    failure: str = ""
    start_s: float = 0.0
    first_s: float | None = None
    end_s: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        return not self.refusal and not self.failure

    @property
    def finish_reason(self) -> str:
        return self.finish.get("type", "")

    @property
    def gaps(self) -> list[float]:
        """Per token, the distance of the two best logits; needs two alternatives per token."""
        return [first - second for (_, first), (_, second), *_ in self.best]

    def cut(self, count: int) -> Completion:
        """What a request with `max_new_tokens=count` gets, if the answer has at least so many tokens."""
        kept = {name: getattr(self, name)[:count] for name in ("ids", "logprobs", "best")}
        return replace(self, **kept, finish={"type": "length"})

    @classmethod
    def from_generate(cls, status: int, content: Any) -> Completion:
        """Reads a response of SGLang's POST /generate.

        Args:
            status: HTTP status code.
            content: the response's JSON, or its text if it is not JSON.
        """
        if 400 <= status < 500:
            return cls(refusal=_message(content))
        if status != 200 or "meta_info" not in content:
            return cls(failure=f"HTTP {status}: {_message(content)}")
        meta = content["meta_info"]
        finish = meta.get("finish_reason") or {}
        failure = ""
        if finish.get("type") == "abort":
            failure = str(finish.get("message") or "aborted")
            if 400 <= (finish.get("status_code") or 500) < 500:
                return cls(refusal=failure, finish=finish, meta=meta)
        ids = content.get("output_ids", [])
        return cls(
            ids=ids,
            text=content["text"],
            finish=finish,
            prompt_tokens=meta.get("prompt_tokens", 0),
            tokens=meta.get("completion_tokens", len(ids)),
            cached_tokens=meta.get("cached_tokens", 0),
            logprobs=[row[0] for row in meta.get("output_token_logprobs") or []],
            best=[[(row[1], row[0]) for row in rows] for rows in meta.get("output_top_logprobs") or []],
            **_speculation(meta),
            failure=failure,
            meta=meta,
        )


def _speculation(details: dict[str, Any]) -> dict[str, Any]:
    """The fields on speculation, from SGLang's `meta_info` or `SpecTokensDetails`."""
    histogram = details.get("spec_correct_drafts_histogram") or []
    return {
        "steps": details.get("spec_verify_ct") or sum(histogram),
        "drafted": drafted(details),
        "accept_histogram": histogram,
        "adapts": bool(details.get("spec_cap_lens_histogram")),
    }


def drafted(details: dict[str, Any]) -> int:
    """Number of drafts that were verified.

    From the histogram of widths if there is one; SGLang's own worker has none, and counts whole blocks.

    Args:
        details: SGLang's `SpecTokensDetails` of one answer.
    """
    widths = details.get("spec_cap_lens_histogram") or []  # number of steps with 0, 1, 2, ... rows
    if widths:
        return sum((width - 1) * steps for width, steps in enumerate(widths) if width)
    return details.get("spec_num_proposed_drafts") or 0


def _message(content: Any) -> str:
    """The message of an error response, in either of SGLang's two formats."""
    if isinstance(content, dict):
        error = content.get("error", content)
        content = error.get("message", error) if isinstance(error, dict) else error
    return sentence(content)

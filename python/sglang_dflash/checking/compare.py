"""Compares an answer with speculation on to the same request's answer, alone, with speculation off. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.serving import Completion, TiePolicy, differs_at

OFF, ON = "with speculation off", "with speculation on"  # in reports


@dataclass(frozen=True, slots=True)
class Request:
    """One request of one case.

    Fields:
        case: the name of the case it belongs to.
        prompt_id: names the prompt in reports.
        body: of POST /generate; always has `input_ids` and `sampling_params`.
    """

    case: str
    prompt_id: str
    body: dict[str, Any]

    @property
    def sampled(self) -> bool:
        return self.body["sampling_params"].get("temperature", 1.0) > 0


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between an answer and the one that it must equal.

    Fields:
        kind: token, length, text, finish, logprob or failure.
        index: of the first token that differs.
        off_id, on_id: the tokens at `index`; None if that answer has ended or the difference has no token.
        gap: in the off arm, its own token's logprob minus that of the on arm's token; None if unknown.
        tie: whether rounding alone explains it.
        said: further details in words.
    """

    kind: str
    index: int = 0
    off_id: int | None = None
    on_id: int | None = None
    gap: float | None = None
    tie: bool = False
    said: str = ""


def first_difference(request: Request, off: Completion, on: Completion, ties: TiePolicy) -> Difference | None:
    """The first difference, or None.

    Args:
        request: the request; if it samples, no difference is a tie.
        off: the answer alone with speculation off.
        on: an answer or a failure.
    """
    if on.failure:
        return Difference("failure", said=on.failure)
    shared = min(len(off.ids), len(on.ids))
    for index in range(shared):
        if off.ids[index] != on.ids[index]:
            return _token_difference(off, on, index, ties, request.sampled)
    if len(off.ids) != len(on.ids):
        off_id, on_id = (answer.ids[shared] if len(answer.ids) > shared else None for answer in (off, on))
        return Difference("length", shared, off_id, on_id, said=f"{len(off.ids)} tokens {OFF}, {len(on.ids)} {ON}")
    if off.finish != on.finish:
        return Difference("finish", shared, said=f"finish reason {off.finish} {OFF}, {on.finish} {ON}")
    if off.text != on.text:
        return Difference("text", shared, said=f"the tokens are equal, but the text {_around(off.text, on.text)}")
    if request.body.get("return_logprob"):
        return _logprob_difference(off, on, ties)
    return None


def _token_difference(off: Completion, on: Completion, index: int, ties: TiePolicy, sampled: bool) -> Difference:
    off_id, on_id = off.ids[index], on.ids[index]
    ranked = dict(off.best[index]) if index < len(off.best) else {}
    gap, said = None, ""
    if ranked and on_id in ranked and off_id in ranked:
        gap = ranked[off_id] - ranked[on_id]
    elif ranked and off_id in ranked:
        gap = ranked[off_id] - min(ranked.values())
        said = f"the token {ON} is not among the best {len(ranked)} {OFF}"
    tie = not sampled and gap is not None and not said and ties.excuses(gap)
    return Difference("token", index, off_id, on_id, gap, tie, said)


def _logprob_difference(off: Completion, on: Completion, ties: TiePolicy) -> Difference | None:
    """Compares the logprobs of the chosen tokens, and those of the alternatives that both arms report."""
    if len(on.logprobs) != len(off.logprobs):
        return Difference("logprob", said=f"{len(off.logprobs)} logprobs {OFF}, {len(on.logprobs)} {ON}")
    for index, (a, b) in enumerate(zip(off.logprobs, on.logprobs, strict=False)):
        if not ties.close(a, b):
            return Difference(
                "logprob", index, off.ids[index], off.ids[index], said=f"logprob {a:.6f} {OFF}, {b:.6f} {ON}"
            )
    for index, (ours, theirs) in enumerate(zip(off.best, on.best, strict=False)):
        for (_, a), (_, b) in zip(ours, theirs, strict=False):
            if not ties.close(a, b):
                said = f"logprob of an alternative token: {a:.6f} {OFF}, {b:.6f} {ON}"
                return Difference("logprob", index, said=said)
    return None


def _around(a: str, b: str) -> str:
    index = differs_at(a, b)
    return f"at character {index} is {a[index : index + 20]!r} {OFF} and {b[index : index + 20]!r} {ON}"


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Extra verify steps of the same requests in one way, compared with another.

    Fields:
        share: extra steps, as a share of the smaller number.
        lost: whether rounding does not explain them.
    """

    share: float
    lost: bool


def step_loss(steps: Sequence[int], fewest: Sequence[int], exact: bool) -> StepLoss:
    """Compares two ways, request by request.

    Args:
        steps, fewest: verify steps per request, in this way and in the way that takes the fewest in total.
        exact: True in float32, where rounding flips no draft: more than 2 % extra steps are a loss. Otherwise more than
            5 % are, if they also exceed twice the root of the sum of squares, the size of independent flips.
    """
    extra = [a - b for a, b in zip(steps, fewest, strict=True)]
    share = sum(extra) / max(1, sum(fewest))
    if exact:
        return StepLoss(share, share > 0.02)
    scatter = sum(value * value for value in extra) ** 0.5
    return StepLoss(share, share > 0.05 and sum(extra) > 2 * scatter)


def describe_token(token: int | None, texts: dict[int, str]) -> str:
    """`'the' (278)`, for reports."""
    if token is None:
        return "the end"
    return f"{texts[token]!r} ({token})" if token in texts else str(token)


def tokens_named(differences: Iterable[Any]) -> list[int]:
    """Token ids whose texts a report on these differences needs."""
    return sorted({token for d in differences for token in (d.off_id, d.on_id) if token is not None})

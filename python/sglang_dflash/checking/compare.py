"""Compares an answer with speculation on to the same request's answer, alone, with speculation off. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.checking.asking import Outcome, Request

MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
OFF, ON = "with speculation off", "with speculation on"  # in reports
TIE_ULPS = {"float32": 8.0, "float16": 4.0, "bfloat16": 4.0}
LOGIT_SIZE = 16.0  # typical size of the best logits; a ULP is that of numbers from 16 to 32
LOGPROB_GAPS = 4.0  # a logprob may differ by this many tie gaps: it depends on the logits of the whole vocabulary


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Differences that rounding alone explains.

    Fields:
        tie_gap: two tokens may swap if their logits in the off arm differ by at most this.
        logprob: a reported logprob may differ by at most this.
    """

    tie_gap: float
    logprob: float

    @classmethod
    def of(cls, dtype: str, tie_ulps: float | None = None) -> Tolerance:
        """
        Args:
            dtype: the model's compute dtype; an unknown one counts as bfloat16.
            tie_ulps: the tie gap in units in the last place of a logit from 16 to 32; None: the dtype's default.
        """
        dtype = dtype if dtype in MANTISSA_BITS else "bfloat16"
        ulps = TIE_ULPS[dtype] if tie_ulps is None else tie_ulps
        gap = ulps * LOGIT_SIZE * 2.0 ** -MANTISSA_BITS[dtype]
        return cls(gap, LOGPROB_GAPS * gap)


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


def first_difference(request: Request, off: Outcome, on: Outcome, tolerance: Tolerance) -> Difference | None:
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
            return _token_difference(off, on, index, tolerance, request.sampled)
    if len(off.ids) != len(on.ids):
        off_id, on_id = (answer.ids[shared] if len(answer.ids) > shared else None for answer in (off, on))
        return Difference("length", shared, off_id, on_id, said=f"{len(off.ids)} tokens {OFF}, {len(on.ids)} {ON}")
    if off.finish != on.finish:
        return Difference("finish", shared, said=f"finish reason {off.finish} {OFF}, {on.finish} {ON}")
    if off.text != on.text:
        return Difference("text", shared, said=f"the tokens are equal, but the text {_around(off.text, on.text)}")
    if request.body.get("return_logprob"):
        return _logprob_difference(off, on, tolerance)
    return None


def _token_difference(off: Outcome, on: Outcome, index: int, tolerance: Tolerance, sampled: bool) -> Difference:
    off_id, on_id = off.ids[index], on.ids[index]
    ranked = dict(off.best[index]) if index < len(off.best) else {}
    gap, said = None, ""
    if ranked and on_id in ranked and off_id in ranked:
        gap = ranked[off_id] - ranked[on_id]
    elif ranked and off_id in ranked:
        gap = ranked[off_id] - min(ranked.values())
        said = f"the token {ON} is not among the best {len(ranked)} {OFF}"
    tie = not sampled and gap is not None and not said and gap <= tolerance.tie_gap
    return Difference("token", index, off_id, on_id, gap, tie, said)


def _logprob_difference(off: Outcome, on: Outcome, tolerance: Tolerance) -> Difference | None:
    """Compares the logprobs of the chosen tokens, and those of the alternatives that both arms report."""
    if len(on.logprobs) != len(off.logprobs):
        return Difference("logprob", said=f"{len(off.logprobs)} logprobs {OFF}, {len(on.logprobs)} {ON}")
    for index, (a, b) in enumerate(zip(off.logprobs, on.logprobs, strict=False)):
        if not _close(a, b, tolerance):
            return Difference(
                "logprob", index, off.ids[index], off.ids[index], said=f"logprob {a:.6f} {OFF}, {b:.6f} {ON}"
            )
    for index, (ours, theirs) in enumerate(zip(off.best, on.best, strict=False)):
        for (_, a), (_, b) in zip(ours, theirs, strict=False):
            if not _close(a, b, tolerance):
                said = f"logprob of an alternative token: {a:.6f} {OFF}, {b:.6f} {ON}"
                return Difference("logprob", index, said=said)
    return None


def _close(a: float, b: float, tolerance: Tolerance) -> bool:
    """Unlikely tokens have large logprobs with larger rounding errors, so their tolerance is larger."""
    return abs(a - b) <= tolerance.logprob * max(1.0, abs(a) / LOGIT_SIZE)


def _around(a: str, b: str) -> str:
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"at character {index} is {a[index : index + 20]!r} {OFF} and {b[index : index + 20]!r} {ON}"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance over some requests.

    Fields:
        steps: number of verify steps.
        by_position: share of the steps in which draft 1, 2, ... was accepted.
        tau: mean commit_len; 0.0 without steps.
    """

    steps: int
    by_position: list[float]
    tau: float

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Acceptance:
        counts: list[int] = []  # by accept_len
        for outcome in outcomes:
            counts += [0] * (len(outcome.histogram) - len(counts))
            for accept_len, count in enumerate(outcome.histogram):
                counts[accept_len] += count
        steps = sum(counts)
        if not steps:
            return cls(0, [], 0.0)
        by_position = [sum(counts[position:]) / steps for position in range(1, len(counts))]
        return cls(steps, by_position, 1.0 + sum(by_position))


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

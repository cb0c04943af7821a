"""Compares what a request got with speculation on with what it got alone with speculation off. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.checking.asking import Outcome, Request

MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
TIE_ULPS = {"float32": 8.0, "float16": 4.0, "bfloat16": 4.0}
LOGIT_SIZE = 16.0  # best logits lie around here; a ULP is that of numbers from 16 to 32
LOGPROB_GAPS = 4.0  # a logprob may differ by so many tie gaps: it moves with the logits of the whole vocabulary


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding alone may do.

    Fields:
        tie_gap: two tokens whose logits in the off arm lie no farther apart may swap.
        logprob: by so much a reported logprob may differ.
    """

    tie_gap: float
    logprob: float

    @classmethod
    def of(cls, dtype: str, tie_ulps: float | None = None) -> Tolerance:
        """
        Args:
            dtype: the model's compute dtype; an unknown one counts as bfloat16.
            tie_ulps: in units of the last place of a logit from 16 to 32; None: the dtype's default.
        """
        dtype = dtype if dtype in MANTISSA_BITS else "bfloat16"
        ulps = TIE_ULPS[dtype] if tie_ulps is None else tie_ulps
        gap = ulps * LOGIT_SIZE * 2.0 ** -MANTISSA_BITS[dtype]
        return cls(gap, LOGPROB_GAPS * gap)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the one it must equal.

    Fields:
        kind: token, length, text, finish, logprob or failure.
        index: of the first token that differs.
        off_id, on_id: the tokens there; None where one answer has ended, or no token differs.
        gap: how much likelier the off arm found its own token than the on arm's; None where it is unknown.
        tie: rounding alone explains it.
        said: the rest in words.
    """

    kind: str
    index: int = 0
    off_id: int | None = None
    on_id: int | None = None
    gap: float | None = None
    tie: bool = False
    said: str = ""


def first_difference(request: Request, off: Outcome, on: Outcome, tolerance: Tolerance) -> Difference | None:
    """The first thing that differs, or None.

    Args:
        request: what was asked; no two tokens tie where it draws them.
        off: answered, alone, with speculation off.
        on: answered or failed.
    """
    if on.failure:
        return Difference("failure", said=on.failure)
    shared = min(len(off.ids), len(on.ids))
    for index in range(shared):
        if off.ids[index] != on.ids[index]:
            return _token_difference(off, on, index, tolerance, request.sampled)
    if len(off.ids) != len(on.ids):
        off_id, on_id = (answer.ids[shared] if len(answer.ids) > shared else None for answer in (off, on))
        return Difference("length", shared, off_id, on_id, said=f"{len(off.ids)} tokens off, {len(on.ids)} on")
    if off.finish != on.finish:
        return Difference("finish", shared, said=f"finish reason {off.finish} off, {on.finish} on")
    if off.text != on.text:
        return Difference("text", shared, said=f"equal tokens, but the text {_around(off.text, on.text)}")
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
        said = f"the on arm's token is not among the off arm's best {len(ranked)}"
    tie = not sampled and gap is not None and not said and gap <= tolerance.tie_gap
    return Difference("token", index, off_id, on_id, gap, tie, said)


def _logprob_difference(off: Outcome, on: Outcome, tolerance: Tolerance) -> Difference | None:
    """Over the chosen tokens, and over the values of the alternatives that both report."""
    if len(on.logprobs) != len(off.logprobs):
        return Difference("logprob", said=f"{len(off.logprobs)} logprobs off, {len(on.logprobs)} on")
    for index, (a, b) in enumerate(zip(off.logprobs, on.logprobs, strict=False)):
        if not _close(a, b, tolerance):
            return Difference("logprob", index, off.ids[index], off.ids[index], said=f"logprob {a:.6f} off, {b:.6f} on")
    for index, (ours, theirs) in enumerate(zip(off.best, on.best, strict=False)):
        for (_, a), (_, b) in zip(ours, theirs, strict=False):
            if not _close(a, b, tolerance):
                said = f"logprob of an alternative {a:.6f} off, {b:.6f} on"
                return Difference("logprob", index, said=said)
    return None


def _close(a: float, b: float, tolerance: Tolerance) -> bool:
    """Unlikely tokens have large logprobs, rounded accordingly."""
    return abs(a - b) <= tolerance.logprob * max(1.0, abs(a) / LOGIT_SIZE)


def _around(a: str, b: str) -> str:
    index = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"goes on with {a[index : index + 20]!r} off and with {b[index : index + 20]!r} on, at character {index}"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Verify steps of some requests.

    Fields:
        steps: how many.
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
    """Whether the same requests took more verify steps in one way than in another.

    Fields:
        share: steps too many, as a share of the fewer.
        lost: rounding does not explain them.
    """

    share: float
    lost: bool


def step_loss(steps: Sequence[int], fewest: Sequence[int], exact: bool) -> StepLoss:
    """Paired over requests.

    Args:
        steps, fewest: per request, of the way in question and of the way that takes the fewest in all.
        exact: in float32 no draft flips, so two percent are a loss; elsewhere five are, where they are more than twice
            what independent flips would add up to.
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
    """Ids whose texts a report on these differences needs."""
    return sorted({token for d in differences for token in (d.off_id, d.on_id) if token is not None})

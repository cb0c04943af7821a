"""Tau by position of answers, also where steps have verified fewer rows than whole blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import sqrt

from sglang_dflash.serving import Completion

FEW_VERIFIED = 5
"""Steps, fewer of which say nothing of a draft's position."""


@dataclass(frozen=True, slots=True)
class Tau:
    """
    Fields:
        steps: verify steps with drafts.
        by_position: share of these steps that accept, or with more rows would accept, draft 1, 2, ...; falling.
        error: standard error of tau, by the scatter of the steps.
        estimated: whether some steps verified fewer rows than the block has. Then draft k counts over the steps that
            verified it; where hardly any did, it follows the draft before it as that one follows its own. The worker
            verifies the likelier ones, so the estimate is rather too high.
    """

    steps: int = 0
    by_position: tuple[float, ...] = ()
    error: float = 0.0
    estimated: bool = False

    @property
    def accepted(self) -> float:
        """Drafts a step."""
        return sum(self.by_position)

    @property
    def tau(self) -> float:
        """Tokens a step; 0.0 without steps."""
        return 1 + self.accepted if self.steps else 0.0

    @classmethod
    def of(cls, answers: Iterable[Completion], drafts: int = 0) -> Tau:
        """drafts: of a whole block; 0: as many as some step verified."""
        held = [one for one in answers if one.steps]
        accepts = _sums(one.accept_histogram for one in held)
        caps = _sums(one.meta.get("spec_cap_lens_histogram") or _whole(one) for one in held)
        drafted = sum(caps[2:])
        most = max(drafts, len(caps) - 2) if drafted else 0
        shares: list[float] = []
        for position in range(1, most + 1):
            verified = sum(caps[position + 1 :])
            if verified >= min(FEW_VERIFIED, drafted):
                share = sum(accepts[position:]) / verified
            else:
                before, last = [1.0, *shares][-2:]
                share = last * last / before if before else 0.0
            shares.append(min([share, *shares[-1:]]))
        plain = sum(caps[:2])  # steps without drafts, which accepted none
        trimmed = any(caps[2:-1]) or (drafted > 0 and most > len(caps) - 2)
        return cls(drafted, tuple(shares), _error(accepts, plain, drafted, sum(shares)), trimmed)


def ratio(one: Tau, other: Tau) -> float:
    """Of the drafts that `one` and `other` accept a step; 1.0 where the other accepts none."""
    return one.accepted / other.accepted if other.accepted else 1.0


def surely_less(one: Tau, other: Tau, errors: float = 3.0) -> bool:
    """Whether `one` accepts fewer drafts, by so many standard errors."""
    return other.accepted - one.accepted > errors * sqrt(one.error**2 + other.error**2)


def _whole(answer: Completion) -> list[int]:
    """The histogram of rows of an answer whose steps are all whole blocks. SGLang counts proposed drafts so."""
    rows = 1 + round(answer.drafted / answer.steps) if answer.drafted else len(answer.accept_histogram)
    return [*([0] * rows), answer.steps]


def _sums(histograms: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*histograms, fillvalue=0)]


def _error(accepts: Sequence[int], plain: int, drafted: int, accepted: float) -> float:
    """The standard error of `accepted` drafts a step: that of the verified ones, as much larger as they are more."""
    if drafted < 2:
        return 0.0
    counts = [max(0, accepts[0] - plain), *accepts[1:]] if accepts else []
    mean = sum(length * count for length, count in enumerate(counts)) / drafted
    squares = sum(count * (length - mean) ** 2 for length, count in enumerate(counts))
    return sqrt(squares / (drafted - 1) / drafted) * (max(1.0, accepted / mean) if mean else 1.0)

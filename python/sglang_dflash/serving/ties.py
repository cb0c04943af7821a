"""The rule for differences that rounding alone explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}
TIE_ULPS = {"float32": 8.0, "float16": 4.0, "bfloat16": 4.0}
LOGIT_SIZE = 16.0  # typical size of the best logits; a ULP is that of numbers from 16 to 32
LOGPROB_GAPS = 4.0  # a logprob may differ by this many tie gaps: it depends on the logits of the whole vocabulary
TOKENS_PER_TIE = 10_000


@dataclass(frozen=True, slots=True)
class TiePolicy:
    """Two tokens tie if the target's logits of both are equal up to rounding.

    Fields:
        tie_gap: the largest difference of two logits that is a tie.
        exact: ties are rare, as in float32: more than one per TOKENS_PER_TIE tokens has another reason.
    """

    tie_gap: float
    exact: bool = True

    @classmethod
    def of(cls, dtype: str, tie_ulps: float | None = None) -> TiePolicy:
        """
        Args:
            dtype: the model's compute dtype; an unknown one counts as bfloat16.
            tie_ulps: the tie gap in units in the last place of a logit from 16 to 32; None: the dtype's default.
        """
        known = dtype if dtype in MANTISSA_BITS else "bfloat16"
        ulps = TIE_ULPS[known] if tie_ulps is None else tie_ulps
        return cls(ulps * LOGIT_SIZE * 2.0 ** -MANTISSA_BITS[known], exact=known == "float32")

    def excuses(self, gap: float) -> bool:
        return gap <= self.tie_gap

    def too_many(self, ties: int, tokens: int) -> bool:
        """Whether rounding does not explain so many ties in so many tokens."""
        return self.exact and ties > -(-tokens // TOKENS_PER_TIE)

    def close(self, a: float, b: float) -> bool:
        """Whether two logprobs of a token are equal up to rounding.

        Unlikely tokens have large logprobs with larger rounding errors, so their tolerance is larger.
        """
        return abs(a - b) <= LOGPROB_GAPS * self.tie_gap * max(1.0, abs(a) / LOGIT_SIZE)


def differs_at(one: Sequence[object], other: Sequence[object]) -> int:
    """The first index at which two answers, ids or text, differ; the length of the shorter if none does before."""
    shared = min(len(one), len(other))
    return next((index for index in range(shared) if one[index] != other[index]), shared)

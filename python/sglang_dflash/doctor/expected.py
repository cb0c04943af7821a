"""What tau should be, by the draft's card or the user, and how far below it is too far."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sglang_dflash.doctor.card import Card

INERT = 1.15
"""Below it, a step commits hardly more tokens than plain decoding, whatever the card says."""
FAR, SOME = 0.7, 0.85
"""Share of the expected accepted drafts below which acceptance fails, or is doubted. Nine questions of the embedded
pair scatter by 7 %. Kinds of text differ by far more, so a kind that the card lacks is judged by its least one."""


@dataclass(frozen=True, slots=True)
class Expected:
    """
    Fields:
        by_kind: tau of kinds of text.
        source: who says so, for sentences.
    """

    by_kind: Mapping[str, float] = field(default_factory=dict)
    source: str = "the card"

    def least(self, kinds: Collection[str]) -> float:
        """Tau over these kinds; a kind that the card lacks counts as the one with the lowest tau."""
        lowest = min(self.by_kind.values())
        return sum(self.by_kind.get(kind, lowest) for kind in kinds) / len(kinds)

    def said(self, kinds: Collection[str]) -> str:
        """For a sentence."""
        known = set(kinds) <= set(self.by_kind) or len(self.by_kind) == 1
        return f"{self.source} says {self.least(kinds):.2f}" + ("" if known else " or more")


def expected(card: Card, expect_tau: float | None) -> Expected | None:
    """
    Args:
        expect_tau: what the user says, which wins.

    Returns:
        None where nobody says anything.
    """
    if expect_tau is not None:
        return Expected({"": expect_tau}, "--expect-tau")
    return Expected(card.taus) if card.taus else None


def share(tau: float, of: float) -> float:
    """Of the accepted drafts a step that `of` stands for."""
    return (tau - 1) / (of - 1) if of > 1 else 1.0


def sentence_of_check(tau: float, card: Card) -> str:
    """What `check` says of a tau over any texts; "" if it is not far below the card's least."""
    if not card.taus or share(tau, min(card.taus.values())) >= FAR:
        return ""
    kinds = ", ".join(f"{kind} {one:.2f}" for kind, one in card.taus.items())
    return (
        f"tau is {tau:.2f}, far below the draft's card ({kinds}): `sglang-dflash doctor URL` of a running server names "
        "the likely causes"
    )

"""Counts what planned steps verified, what was promised of it, and what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

STATE = "dflash_plan"
"""Name of the counts in `/server_info`, in each of `internal_states`."""


@dataclass(slots=True)
class PlanCounts:
    """Sums over decode steps.

    Fields:
        steps: decode steps.
        seconds: of these steps.
        planning_s: of these seconds, those that the plan itself took.
        blocks: blocks that the draft filled: one for each drafted request of a step.
        rows: rows of these blocks that were verified, without the anchors.
        depth: depths of their deepest rows.
        promised: drafts that should be accepted by the plan's chances.
        accepted: drafts that were accepted.
        copies: chains of copied tokens that were verified.
        copied_rows: rows of these chains, without the anchors.
        copied_promised: copied tokens that should be accepted by the plan's chances.
        copied_accepted: copied tokens that were accepted.
    """

    steps: int = 0
    seconds: float = 0.0
    planning_s: float = 0.0
    blocks: int = 0
    rows: int = 0
    depth: int = 0
    promised: float = 0.0
    accepted: int = 0
    copies: int = 0
    copied_rows: int = 0
    copied_promised: float = 0.0
    copied_accepted: int = 0

    def chose(self, lens: Sequence[int], depth: int, promised: float) -> None:
        """A step verifies `lens` rows of its drafted requests, anchors included. depth, promised: the step's part."""
        self.blocks += len(lens)
        self.rows += sum(lens) - len(lens)
        self.depth += depth
        self.promised += promised

    def since(self, before: PlanCounts) -> PlanCounts:
        return PlanCounts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def copy(self) -> PlanCounts:
        return PlanCounts(*astuple(self))

    @classmethod
    def total(cls, parts: Iterable[PlanCounts]) -> PlanCounts:
        """Of several replicas."""
        return cls(*map(sum, zip(astuple(cls()), *map(astuple, parts), strict=True)))

    def __str__(self) -> str:
        """The means of a block and of a copy, in words."""
        if not self.blocks and not self.copies:
            return f"nothing was drafted in {self.steps} steps"
        words = f"{self.blocks} blocks in {self.steps} steps"
        if self.blocks:
            words += (
                f", on average {self.rows / self.blocks:.2f} rows and {self.depth / self.blocks:.2f} deep; of a block, "
                f"{self.promised / self.blocks:.2f} drafts were promised and {self.accepted / self.blocks:.2f} accepted"
            )
        if self.copies:
            words += (
                f"; {self.copies} copies of {self.copied_rows / self.copies:.2f} tokens, of which "
                f"{self.copied_promised / self.copies:.2f} were promised and "
                f"{self.copied_accepted / self.copies:.2f} accepted"
            )
        return f"{words}; planning took {self.planning_s / self.seconds:.1%} of the time" if self.planning_s else words

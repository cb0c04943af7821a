"""Counts what planned steps verified, what was promised of it, and what was accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

STATE = "dflash_plan"
"""Name of the counts in `/server_info`, in each of `internal_states`."""
PREFILLED = "dflash_prefilled"
"""Beside them: the number of prompt tokens whose draft KV prefills have computed, that is, not found in the cache."""


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """Verified rows of one depth: how many, and how many of them were promised and accepted."""

    rows: int = 0
    promised: float = 0.0
    accepted: int = 0

    def plus(self, other: DepthCounts, sign: int = 1) -> DepthCounts:
        return DepthCounts(
            self.rows + sign * other.rows,
            self.promised + sign * other.promised,
            self.accepted + sign * other.accepted,
        )


@dataclass(slots=True)
class PlanCounts:
    """Sums over decode steps. Those of blocks may lack the latest drafted steps, up to `Policy.settle`.

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
        by_depth: the verified rows by depth, from 1.
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
    by_depth: list[DepthCounts] = field(default_factory=list)

    def add_blocks(self, blocks: int, rows: int, depth: int, promised: float, accepted: int) -> None:
        """The draft has filled `blocks` blocks. The rest as in `ops.VerifiedRows`."""
        self.blocks += blocks
        self.rows += rows
        self.depth += depth
        self.promised += promised
        self.accepted += accepted

    def since(self, before: PlanCounts) -> PlanCounts:
        return self._plus(before, -1)

    def copy(self) -> PlanCounts:
        return replace(self, by_depth=list(self.by_depth))

    def _plus(self, other: PlanCounts, sign: int) -> PlanCounts:
        names = [each.name for each in fields(self) if each.name != "by_depth"]
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in names}
        pairs = zip_longest(self.by_depth, other.by_depth, fillvalue=DepthCounts())
        return PlanCounts(**sums, by_depth=[one.plus(another, sign) for one, another in pairs])

    @classmethod
    def total(cls, parts: Iterable[PlanCounts]) -> PlanCounts:
        """Of several replicas."""
        whole = cls()
        for part in parts:
            whole = whole._plus(part, 1)
        return whole

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> PlanCounts:
        """Inverse of `dataclasses.asdict`. Raises TypeError if the names are others."""
        counts = cls(**state)
        counts.by_depth = [DepthCounts(**one) for one in state.get("by_depth", [])]
        return counts

    def calibration(self) -> str:
        """The shares of each depth's rows that were promised and accepted, in words; empty if no row was verified."""
        return "; ".join(
            f"depth {depth}: {one.rows} rows, promised {one.promised / one.rows:.2f}, "
            f"accepted {one.accepted / one.rows:.2f}"
            for depth, one in enumerate(self.by_depth, start=1)
            if one.rows
        )

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

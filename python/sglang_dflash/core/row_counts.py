"""Counts what steps verified, what was promised of it, and what was accepted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sglang_dflash.core.policy import Step

STATE = "dflash_rows"
"""Name of the counts in `/server_info`, in each of `internal_states`."""
PREFILLED = "dflash_prefilled"
"""Beside them: the number of prompt tokens whose draft KV prefills have computed, that is, not found in the cache."""

SECONDS = "dflash_step_seconds"
"""Beside them: a `StepSeconds`, where steps are timed."""


@dataclass(slots=True)
class RowCounts:
    """Sums over decode steps.

    Fields:
        steps: decode steps.
        blocks: blocks that the draft filled: one for each drafted request of a step.
        rows: rows of these blocks that were verified, without the anchors.
        promised: drafts that should be accepted by their chances.
        accepted: drafts that were accepted.
        copies: copies of which rows were verified (`SGLANG_DFLASH_COPIES=1`).
        copied: tokens of copies that were accepted.
    """

    steps: int = 0
    blocks: int = 0
    rows: int = 0
    promised: float = 0.0
    accepted: int = 0
    copies: int = 0
    copied: int = 0

    def add(self, step: Step) -> None:
        """Adds the blocks of a step."""
        depth = np.arange(1, step.survival.shape[1] + 1)
        self.blocks += len(step.lens)
        self.rows += int(step.lens.sum()) - len(step.lens)
        self.promised += float(step.survival[depth < step.lens[:, None]].sum())
        self.accepted += int(step.commit_lens.sum()) - len(step.lens)

    def add_copies(self, lens: np.ndarray, commit_lens: np.ndarray) -> None:
        """lens, commit_lens: [c] int; of the requests of a step that may have had their copies verified."""
        self.copies += int((lens > 1).sum())
        self.copied += int(commit_lens.sum()) - len(commit_lens)

    def since(self, before: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))

    @classmethod
    def total(cls, parts: Iterable[dict[str, Any]]) -> RowCounts:
        """Of several replicas, each as `dataclasses.asdict` gives it. Raises TypeError if the names are others."""
        counts = [cls(**part) for part in parts]
        return cls(*(sum(getattr(part, one.name) for part in counts) for one in fields(cls)))

    def __str__(self) -> str:
        """The means of a block, in words."""
        copies = f"; {self.copies} copies, of which {self.copied} tokens were accepted" if self.copies else ""
        if not self.blocks:
            return f"nothing was drafted in {self.steps} steps{copies}"
        return (
            f"{self.blocks} blocks in {self.steps} steps, on average {self.rows / self.blocks:.2f} rows; of a block, "
            f"{self.promised / self.blocks:.2f} drafts were promised and {self.accepted / self.blocks:.2f} accepted"
            f"{copies}"
        )

"""What a worker asks about its rows, step by step, and the simplest answer: always the same number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Drafting(NamedTuple):
    """Whom a step drafts, decided before the draft runs.

    Fields:
        width: W, rows of a block, anchor included; 1: nobody is drafted.
        requests: places of the drafted requests, rising.
        rows: rows of all requests together that the step should verify, anchors included; for a device that chooses
            which.
    """

    width: int
    requests: list[int]
    rows: int


class Step(NamedTuple):
    """What became of a step's rows; it may be known some steps later.

    Fields:
        names: of the drafted requests, [b].
        survival: [b, W - 1]; the chances by which the rows were chosen, see `ops.survival`.
        lens: [b] int; rows that were verified, anchors included.
        commit_lens: [b] int.
    """

    names: Sequence[str]
    survival: np.ndarray
    lens: np.ndarray
    commit_lens: np.ndarray


class StepSeconds(NamedTuple):
    """How long a step of one request takes, in seconds: of plain decoding, and of a whole block with its draft."""

    plain: float
    block: float


class Policy(Protocol):
    """Who chooses the rows of a step.

    Where the CPU reads what the draft computed, `verify` chooses the rows. On CUDA the CPU reads it some steps later;
    the step then verifies all rows, or the likeliest ones, as many as `draft` has said. `see_*` and `learn` may come
    late.
    """

    weighs: bool
    """Whether it asks for the drafts' chances."""

    def draft(self, names: Sequence[str]) -> Drafting:
        """Of a step of these requests."""
        ...

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        """[b, depths] float32, for `ops.survival`. names: of the drafted requests."""
        ...

    def verify(self, survival: np.ndarray) -> np.ndarray:
        """[b] int: rows of each drafted request that the target verifies, anchors included. survival: [b, W - 1]."""
        ...

    def learn(self, step: Step) -> None: ...

    def see_draft(self, rows: int, seconds: float) -> None:
        """A draft over so many rows of all requests took so long."""
        ...

    def see_rest(self, rows: int, seconds: float) -> None:
        """All else of a step that verified so many rows took so long."""
        ...

    def step_seconds(self) -> StepSeconds | None:
        """None until both kinds of step were timed, or where no step is."""
        ...


class CopyingPolicy(Policy, Protocol):
    """A policy that also chooses whose tokens are copied, and how many of them are verified."""

    def draft(self, names: Sequence[str], copies: np.ndarray | None = None) -> Drafting:
        """copies: [B, K - 1]; the survival of each request's copied tokens, 0 where there is none. Whoever is not
        drafted may have its copy verified."""
        ...

    def verify_all(self, survival: np.ndarray) -> np.ndarray:
        """[B] int: `verify` of the drafted requests, and of each other one the rows of its copy, the anchor included.
        survival: [b, W - 1]; of the drafted requests."""
        ...


class SameRows:
    """The simplest policy: as many rows for every request, always."""

    weighs = False

    def __init__(self, width: int) -> None:
        """width: W, K for whole blocks; 1: the draft never runs."""
        self.width = width

    def draft(self, names: Sequence[str]) -> Drafting:
        return Drafting(self.width, list(range(len(names))) if self.width > 1 else [], self.width * len(names))

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        return np.zeros((len(names), depths), np.float32)

    def verify(self, survival: np.ndarray) -> np.ndarray:
        return np.full(len(survival), self.width)

    def learn(self, step: Step) -> None: ...

    def see_draft(self, rows: int, seconds: float) -> None: ...

    def see_rest(self, rows: int, seconds: float) -> None: ...

    def step_seconds(self) -> None:
        """Times are not looked at."""

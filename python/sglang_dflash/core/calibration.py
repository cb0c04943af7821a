"""Turns a draft's probabilities into chances of acceptance, learned while serving.

A draft's probabilities run hot or cold: it was trained on other text, and a target that samples at a high temperature
takes its favourite less often. Platt scaling corrects that: `ops.platt_scaling` has the formula and the
regression. This file keeps the parameters: those of all requests, and one of each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_dflash import ops
from sglang_dflash.core.places import Places
from sglang_dflash.ops.platt_scaling import DEPTHS, SLOPE

REQUESTS = 1024
"""Requests whose offsets are kept."""


class Verified(NamedTuple):
    """What was verified of the b drafted requests of a step: `ops.Lesson`, with their names instead of places."""

    names: list[str]
    drafted: list[int]
    rows: ops.PlannedRows
    path: torch.Tensor
    log_probs: torch.Tensor


class Calibration:
    def __init__(self, depths: int, tuning: ops.PlattTuning | None = None, requests: int = REQUESTS) -> None:
        """
        Args:
            depths: drafts of a block, K - 1.
            requests: requests whose offsets are kept.
        """
        self._tuning = tuning or ops.PlattTuning()
        self._kernels = ops.choose_kernels("cpu").plans
        self._shared = torch.zeros((DEPTHS + depths, 2), dtype=torch.float64)
        self._shared[SLOPE, 0] = 1.0
        self._own = torch.zeros((requests, 2), dtype=torch.float64)
        self._places = Places(requests)  # rows of `_own`

    def chances(self, log_probs: torch.Tensor, requests: Sequence[str]) -> torch.Tensor:
        """Chance that each candidate is accepted if its parent is.

        Args:
            log_probs: [b, D, k] float32; of the draft, falling in the last dimension.
            requests: b names.

        Returns:
            [b, D, k] float32; falling in the last dimension.
        """
        return self._kernels.platt(log_probs, *self._parameters(requests))

    def plan(
        self, log_probs: torch.Tensor, names: Sequence[str], max_rows: int, least: float, drafted: list[int], batch: int
    ) -> ops.ChosenRows:
        """The rows that are reached with a calibrated chance above `least`. See `platt_scaling.plan_rows`.

        Args:
            names: of the b drafted requests.
        """
        return self._kernels.plan_rows(log_probs, *self._parameters(names), max_rows, least, drafted, batch)

    def _parameters(self, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, list[int], float]:
        """What `platt_scaling.platt` needs besides the log-probabilities."""
        rows = [self._places.get(name) for name in names]
        return self._shared, self._own, [-1 if row is None else row for row in rows], self._tuning.max_logit

    def observe(self, steps: Sequence[Verified]) -> None:
        """Learns from the verified rows whose parents were accepted, the oldest step first. All steps together name at
        most as many requests as are kept."""
        lessons = [
            ops.Lesson([self._place(name) for name in names], drafted, rows, path, log_probs)
            for names, drafted, rows, path, log_probs in steps
        ]
        self._kernels.platt_steps(self._shared, self._own, lessons, self._tuning)

    def _place(self, name: str) -> int:
        place, new = self._places.use(name)
        if new:
            self._own[place] = 0.0
        return place

"""Turns a draft's probabilities into chances of acceptance, learned while serving.

A draft's probabilities run hot or cold: it was trained on other text, and a target that samples at a high temperature
takes its favourite less often. Platt scaling corrects that. The logit of a chance is

    slope * logit(probability) + offset of the depth + offset of other candidates than the first + offset of the request

Each verified row whose parent was accepted is one observation. The parameters follow by online logistic regression:
each takes a Newton step on its own, with the information (sum of p * (1 - p)) of its recent observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_dflash import ops

MAX_LOGIT = 12.0  # bounds what a probability of 0 or 1 says
DAMPING = 0.5  # share of a Newton step that is taken, because several parameters explain the same observation


@dataclass(frozen=True, slots=True)
class CalibrationTuning:
    """Tuning values of `Calibration`.

    Fields:
        slope_prior, depth_prior, request_prior: information that a parameter has before any observation. The more,
            the slower it leaves its first value.
        slope_trials, depth_trials, request_trials: observations after which older ones weigh 1/e.
        requests: requests whose offsets are kept.
    """

    slope_prior: float = 20.0
    depth_prior: float = 2.0
    request_prior: float = 2.0
    slope_trials: float = 2048
    depth_trials: float = 512
    request_trials: float = 64
    requests: int = 1024


class Calibration:
    def __init__(self, depths: int, tuning: CalibrationTuning | None = None) -> None:
        """depths: drafts of a block, K - 1."""
        self._tuning = tuning or CalibrationTuning()
        self._slope = _Parameter(1.0)
        self._depths = [_Parameter(0.0) for _ in range(depths)]
        self._others = _Parameter(0.0)  # of other candidates than the first
        self._requests: dict[str, _Parameter] = {}

    def chances(self, log_probs: torch.Tensor, requests: Sequence[str]) -> torch.Tensor:
        """Chance that each candidate is accepted if its parent is.

        Args:
            log_probs: [b, D, k] float32; of the draft, falling in the last dimension.
            requests: b names.

        Returns:
            [b, D, k] float32; falling in the last dimension.
        """
        depths = [depth.value for depth in self._depths]
        own = [self._requests[name].value if name in self._requests else 0.0 for name in requests]
        return ops.platt(log_probs, self._slope.value, depths, self._others.value, own, MAX_LOGIT)

    def observe(
        self,
        names: Sequence[str],
        drafted: Sequence[int],
        rows: ops.PlannedRows,
        path: torch.Tensor,
        log_probs: torch.Tensor,
    ) -> None:
        """Learns from the verified rows whose parents were accepted.

        Args:
            names: of the b drafted requests.
            drafted: their indices among all B requests.
            rows: all rows that were verified.
            path: [B, L] int64; see `ops.TreeAcceptance`.
            log_probs: [b, D, k]; as given to `chances`.
        """
        tuning = self._tuning
        starts, paths = rows.row_starts.tolist(), path.tolist()
        parents, depths, ranks = rows.parents.tolist(), rows.depths.tolist(), rows.ranks.tolist()
        for place, (name, request) in enumerate(zip(names, drafted, strict=True)):
            first, end = starts[request], starts[request + 1]
            if end == first + 1:
                continue
            accepted = set(paths[request])
            said = log_probs[place].tolist()
            own = self._requests.pop(name, None) or _Parameter(0.0)
            self._requests[name] = own  # the newest stand last
            for row in range(first + 1, end):
                if first + parents[row] not in accepted:
                    continue
                depth, rank = depths[row] - 1, ranks[row]
                x = logit(said[depth][rank])
                # With the parameters of now: several rows in a row must not all correct the same error.
                offset = self._depths[depth].value + own.value + (self._others.value if rank > 0 else 0.0)
                chance = 1 / (1 + math.exp(-self._slope.value * x - offset))
                surplus, information = (row in accepted) - chance, chance * (1.0 - chance) + 1e-4
                self._slope.step(surplus * x, information * x * x, tuning.slope_prior, tuning.slope_trials)
                self._slope.value = min(max(self._slope.value, 0.1), 4.0)
                self._depths[depth].step(surplus, information, tuning.depth_prior, tuning.depth_trials)
                own.step(surplus, information, tuning.request_prior, tuning.request_trials)
                if rank > 0:
                    self._others.step(surplus, information, tuning.depth_prior, tuning.depth_trials)
        while len(self._requests) > tuning.requests:
            del self._requests[next(iter(self._requests))]


class _Parameter:
    """A parameter of the regression, and the information of its recent observations."""

    __slots__ = ("information", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.information = 0.0

    def step(self, gradient: float, information: float, prior: float, trials: float) -> None:
        self.information += information - self.information / trials
        value = self.value + DAMPING * gradient / (self.information + prior)
        self.value = min(max(value, -MAX_LOGIT), MAX_LOGIT)


def logit(log_prob: float) -> float:
    """log(p / (1 - p)), within +-MAX_LOGIT."""
    bounded = min(max(log_prob, -MAX_LOGIT), -1e-6)
    return min(max(bounded - math.log1p(-math.exp(bounded)), -MAX_LOGIT), MAX_LOGIT)

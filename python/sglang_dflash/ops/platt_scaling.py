"""The specification of Platt scaling: chances of acceptance from a draft's probabilities, and what they learn.

The logit of a chance is

    slope * logit(probability) + offset of the depth + offset of the request + for other candidates than the first, an
    offset of theirs

Each verified row whose parent was accepted is one observation. The parameters follow by online logistic regression:
each takes a Newton step on its own, with the information (sum of p * (1 - p)) of its recent observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_dflash.ops.tree import PlannedRows, Trees, best_first, take_rows

SLOPE, OTHERS, DEPTHS = range(3)
"""Rows of the shared parameters: the slope, the offset of other candidates than the first, those of depths 1, 2, ..."""
SLOPES = 0.1, 4.0
"""Bounds of the slope."""


class PlattTuning(NamedTuple):
    """Tuning values of the regression.

    Fields:
        slope_prior, depth_prior, request_prior: information that a parameter has before any observation. The more,
            the slower it leaves its first value. Other candidates than the first have the prior of depths.
        slope_trials, depth_trials, request_trials: observations after which older ones weigh 1/e.
        damping: share of a Newton step that is taken, because several parameters explain the same observation.
        max_logit: bounds the logit of a probability, and each offset, to +-max_logit.
    """

    slope_prior: float = 20.0
    slope_trials: float = 2048.0
    depth_prior: float = 2.0
    depth_trials: float = 512.0
    request_prior: float = 2.0
    request_trials: float = 64.0
    damping: float = 0.5
    max_logit: float = 12.0


class ChosenRows(NamedTuple):
    """What a plan verifies.

    Fields:
        chances: [b, D, k] float32; of all candidates of the b drafted requests.
        trees: of these requests.
        rows: of all requests of the step.
        depth: depths of the trees' deepest rows that are verified, in sum.
        promised: drafts that should be accepted by these chances.
    """

    chances: torch.Tensor
    trees: Trees
    rows: PlannedRows
    depth: int
    promised: float


class Lesson(NamedTuple):
    """What one step shows of its b drafted requests.

    Fields:
        places: b rows of `own`, all different; see `platt`.
        drafted: these requests among all B.
        rows: all rows that were verified.
        path: [B, L] int64; see `TreeAcceptance`.
        log_probs: [b, D, k] float32; as in `platt`.
    """

    places: Sequence[int]
    drafted: Sequence[int]
    rows: PlannedRows
    path: torch.Tensor
    log_probs: torch.Tensor


def platt(
    log_probs: torch.Tensor, shared: torch.Tensor, own: torch.Tensor, places: Sequence[int], max_logit: float
) -> torch.Tensor:
    """Chance of each candidate if its parent is accepted: [b, D, k] float32, falling in the last dimension.

    Args:
        log_probs: [b, D, k] float32, falling in the last dimension; -inf and NaN have no chance.
        shared: [P, 2] float64, at least DEPTHS + D; value and information of each parameter.
        own: [R, 2] float64; the same of single requests.
        places: b rows of `own`; -1: the request has no offset.
    """
    known = log_probs > float("-inf")
    bounded = torch.where(known, log_probs, -max_logit).double().clamp(-max_logit, -1e-6)
    logits = (bounded - torch.log1p(-bounded.exp())).clamp(-max_logit, max_logit) * shared[SLOPE, 0]
    logits += shared[DEPTHS : DEPTHS + log_probs.shape[1], 0, None]
    offsets = torch.tensor([float(own[place, 0]) if place >= 0 else 0.0 for place in places], dtype=torch.float64)
    logits += offsets[:, None, None]
    logits[:, :, 1:] += shared[OTHERS, 0]
    return torch.where(known, logits.sigmoid().float(), 0.0).cummin(-1).values


def plan_rows(
    log_probs: torch.Tensor,
    shared: torch.Tensor,
    own: torch.Tensor,
    places: Sequence[int],
    max_logit: float,
    max_rows: int,
    least: float,
    drafted: Sequence[int],
    batch: int,
) -> ChosenRows:
    """The rows that are reached with a chance above `least`, and at least the anchor of each request.

    Args:
        log_probs, shared, own, places, max_logit: as in `platt`.
        max_rows: most rows of a request.
        drafted: the b requests among all `batch`.
    """
    chances = platt(log_probs, shared, own, places, max_logit)
    trees = best_first(chances, max_rows)
    taken = trees.reaches > least
    taken[:, 0] = True
    depth, promised = int((trees.depths * taken).amax(1).sum()), float((trees.reaches * taken)[:, 1:].sum())
    rows = take_rows(trees, drafted, taken.sum(1).tolist(), batch)
    return ChosenRows(chances, trees, rows, depth, promised)


def platt_steps(shared: torch.Tensor, own: torch.Tensor, lessons: Sequence[Lesson], tuning: PlattTuning) -> None:
    """Learns in place from the verified rows whose parents were accepted, in their order, lesson by lesson.

    Args:
        shared, own: as in `platt`.
    """
    for lesson in lessons:
        _platt_step(shared, own, *lesson, tuning)


def _platt_step(
    shared: torch.Tensor,
    own: torch.Tensor,
    places: Sequence[int],
    drafted: Sequence[int],
    rows: PlannedRows,
    path: torch.Tensor,
    log_probs: torch.Tensor,
    tuning: PlattTuning,
) -> None:
    starts, paths = rows.row_starts.tolist(), path.tolist()
    parents, depths, ranks = rows.parents.tolist(), rows.depths.tolist(), rows.ranks.tolist()

    def learn(parameter: torch.Tensor, gradient: float, information: float, prior: float, trials: float) -> None:
        parameter[1] += information - float(parameter[1]) / trials
        value = float(parameter[0]) + tuning.damping * gradient / (float(parameter[1]) + prior)
        parameter[0] = min(max(value, -tuning.max_logit), tuning.max_logit)

    for i, request in enumerate(drafted):
        first, end = starts[request], starts[request + 1]
        accepted = set(paths[request])
        offset = own[places[i]]
        for row in range(first + 1, end):
            if first + parents[row] not in accepted:
                continue
            depth, rank = shared[DEPTHS + depths[row] - 1], ranks[row]
            said = float(log_probs[i, depths[row] - 1, rank])
            if not said > -math.inf:  # or NaN: nothing was said
                continue
            x = logit(said, tuning.max_logit)
            # With the parameters of now: several rows in a row must not all correct the same error.
            total = float(shared[SLOPE, 0]) * x + float(depth[0]) + float(offset[0])
            chance = 1 / (1 + math.exp(-total - (float(shared[OTHERS, 0]) if rank > 0 else 0.0)))
            surplus, information = (row in accepted) - chance, chance * (1.0 - chance) + 1e-4
            learn(shared[SLOPE], surplus * x, information * x * x, tuning.slope_prior, tuning.slope_trials)
            shared[SLOPE, 0].clamp_(*SLOPES)
            learn(depth, surplus, information, tuning.depth_prior, tuning.depth_trials)
            learn(offset, surplus, information, tuning.request_prior, tuning.request_trials)
            if rank > 0:
                learn(shared[OTHERS], surplus, information, tuning.depth_prior, tuning.depth_trials)


def logit(log_prob: float, max_logit: float) -> float:
    """log(p / (1 - p)), within +-max_logit."""
    bounded = min(max(log_prob, -max_logit), -1e-6)
    return min(max(bounded - math.log1p(-math.exp(bounded)), -max_logit), max_logit)

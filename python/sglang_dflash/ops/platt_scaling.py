"""The specification of Platt scaling: chances of acceptance from a draft's probabilities.

The logit of a chance is

    slope * logit(probability) + offset of the depth + offset of the request + for other candidates than the first, an
    offset of theirs

`planning` has the regression that the parameters follow by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

SLOPE, OTHERS, DEPTHS = range(3)
"""Rows of the shared parameters: the slope, the offset of other candidates than the first, those of depths 1, 2, ..."""
SLOPES = 0.1, 4.0
"""Bounds of the slope."""
SUREST = 4.0
"""Upper bound of a probability's logit. A probability counts up to 0.982: surer drafts are right no more often."""


class PlattTuning(NamedTuple):
    """Tuning values of the regression.

    Fields:
        slope_prior, depth_prior, request_prior: information that a parameter has before any observation. The more,
            the slower it leaves its first value. Other candidates than the first have the prior of depths.
        slope_trials, depth_trials, request_trials: observations after which older ones weigh 1/e.
        damping: share of a Newton step that is taken, because several parameters explain the same observation.
        max_logit: each offset lies within +-max_logit; a probability's logit is not below -max_logit.
    """

    slope_prior: float = 20.0
    slope_trials: float = 2048.0
    depth_prior: float = 2.0
    depth_trials: float = 512.0
    request_prior: float = 2.0
    request_trials: float = 64.0
    damping: float = 0.5
    max_logit: float = 12.0


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
    logits = (bounded - torch.log1p(-bounded.exp())).clamp(-max_logit, SUREST) * shared[SLOPE, 0]
    logits += shared[DEPTHS : DEPTHS + log_probs.shape[1], 0, None]
    offsets = torch.tensor([float(own[place, 0]) if place >= 0 else 0.0 for place in places], dtype=torch.float64)
    logits += offsets[:, None, None]
    logits[:, :, 1:] += shared[OTHERS, 0]
    return torch.where(known, logits.sigmoid().float(), 0.0).cummin(-1).values


def logit(log_prob: float, max_logit: float) -> float:
    """log(p / (1 - p)), from -max_logit to SUREST."""
    bounded = min(max(log_prob, -max_logit), -1e-6)
    return min(max(bounded - math.log1p(-math.exp(bounded)), -max_logit), SUREST)

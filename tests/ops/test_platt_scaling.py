"""Chances of acceptance by Platt scaling."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import NATIVE

from sglang_dflash import ops
from sglang_dflash.ops import platt_scaling
from sglang_dflash.ops.platt_scaling import DEPTHS, OTHERS, SLOPE, SUREST

KERNELS = ops.choose_kernels("cpu", torch.float32)

BODIES = pytest.mark.parametrize(
    "body", [platt_scaling, pytest.param(KERNELS.plans, marks=NATIVE)], ids=["spec", "native"]
)


def parameters(depths: int, requests: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shared, own = (torch.randn(count, 2, generator=random).double() for count in (DEPTHS + depths, requests))
    shared[:, 1], own[:, 1] = shared[:, 1].abs() * 9, own[:, 1].abs() * 9
    shared[SLOPE, 0] = shared[SLOPE, 0].abs() + 0.2
    return shared, own


def by_hand(log_prob: float, slope: float, offset: float, max_logit: float) -> float:
    """One chance, in Python's floats."""
    if not log_prob > -math.inf:
        return 0.0
    probability = math.exp(log_prob)
    logit = math.log(probability / (1 - probability)) if 0 < probability < 1 else math.copysign(math.inf, log_prob + 1)
    return 1 / (1 + math.exp(-slope * min(max(logit, -max_logit), SUREST) - offset))


@BODIES
@settings(max_examples=100, deadline=None)
@given(shape=st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 5)), seed=st.integers(0, 99))
def test_chances(body, shape, seed):
    """Fails where an offset is another depth's or request's, the first candidate gets that of the others, chances do
    not fall, a candidate without a probability has a chance, or one is surer than it may be."""
    random = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(shape, generator=random) * torch.tensor([0.0, 1e-4, 1.0, 40.0])[seed % 4]
    log_probs[torch.rand(shape, generator=random) < 0.2] = -torch.inf
    log_probs = log_probs.sort(-1, descending=True).values
    if seed % 3 == 0:
        log_probs[log_probs.isneginf()] = torch.nan
    shared, own = parameters(shape[1] + seed % 2, 5, seed)
    places = torch.randint(-1, 5, (shape[0],), generator=random).tolist()
    chances = body.platt(log_probs, shared, own, places, 9.0)
    assert chances.dtype == torch.float32 and chances.shape == shape
    for b, d in product(range(shape[0]), range(shape[1])):
        least, offset = 1.0, float(shared[DEPTHS + d, 0]) + (float(own[places[b], 0]) if places[b] >= 0 else 0.0)
        for j, log_prob in enumerate(log_probs[b, d].double().tolist()):
            others = float(shared[OTHERS, 0]) if j else 0.0
            least = min(least, by_hand(log_prob, float(shared[SLOPE, 0]), offset + others, 9.0))
            assert float(chances[b, d, j]) == pytest.approx(least, rel=1e-3, abs=0)
    assert torch.allclose(chances, platt_scaling.platt(log_probs, shared, own, places, 9.0), 1e-6, 0)


@NATIVE
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"places": [0, 6]}, "a place is 6; allowed: -1 .. 5"),
        ({"places": [0]}, "for 1 requests"),
        ({"log_probs": torch.zeros(2, 2, 2).mT}, r"\[b, D, k\]"),
        ({"log_probs": torch.zeros(2, 3, 2)}, "parameters of 2 depths for 3"),
        ({"shared": torch.zeros(5, 2)}, r"float64 of \[P, 2\]"),
        ({"own": torch.zeros(6, 3).double()}, r"float64 of \[P, 2\]"),
    ],
)
def test_wrong_parameters_are_refused(change, words):
    """Fails where memory outside of the parameters is read."""
    shared, own = parameters(2, 6, 0)
    arguments = {"log_probs": torch.zeros(2, 2, 2), "shared": shared, "own": own, "places": [0, -1], "max_logit": 9.0}
    KERNELS.plans.platt(**arguments)
    with pytest.raises(RuntimeError, match=words):
        KERNELS.plans.platt(**arguments | change)

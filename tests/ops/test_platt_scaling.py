"""Chances of acceptance by Platt scaling, and what verified rows teach it."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import NATIVE, make_chances

from sglang_dflash import ops
from sglang_dflash.ops import platt_scaling
from sglang_dflash.ops.platt_scaling import DEPTHS, OTHERS, SLOPE, PlattTuning

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
    return 1 / (1 + math.exp(-slope * min(max(logit, -max_logit), max_logit) - offset))


@BODIES
@settings(max_examples=100, deadline=None)
@given(shape=st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 5)), seed=st.integers(0, 99))
def test_chances(body, shape, seed):
    """Fails where an offset is another depth's or request's, the first candidate gets that of the others, chances do
    not fall, or a candidate without a probability has a chance."""
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
@settings(max_examples=100, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 4)),
    least=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    seed=st.integers(0, 99),
)
def test_the_rows_of_a_plan(shape, least, seed):
    """Fails where one op for a whole plan gives other rows than its parts, or leaves a request without its anchor."""
    random = torch.Generator().manual_seed(seed)
    log_probs = (torch.rand(shape, generator=random).log() * 2).sort(-1, descending=True).values
    shared, own = parameters(shape[1], 6, seed)
    places = torch.randint(-1, 6, (shape[0],), generator=random).tolist()
    drafted = [2 * request + 1 for request in range(shape[0])]
    arguments = log_probs, shared, own, places, 9.0, 8, least, drafted, 2 * shape[0] + 1
    chances, trees, rows, depth, promised = KERNELS.plans.plan_rows(*arguments)
    assert torch.equal(chances, KERNELS.plans.platt(*arguments[:5]))
    assert all(map(torch.equal, trees, KERNELS.plans.best_first(chances, 8)))
    lens = (trees.reaches > least).sum(1).clamp(min=1).tolist()
    expected = KERNELS.plans.take_rows(trees, drafted, lens, 2 * shape[0] + 1)
    assert rows.lens == expected.lens and rows[7:] == expected[7:]
    assert all(map(torch.equal, rows[:5], expected[:5]))
    assert (rows.row_mask is None) == (expected.row_mask is None) and torch.equal(rows.seen(), expected.seen())
    assert depth == sum(max(trees.depths[i, :count].tolist()) for i, count in enumerate(lens))
    assert promised == pytest.approx(sum(float(trees.reaches[i, 1:count].sum()) for i, count in enumerate(lens)))
    specified = platt_scaling.plan_rows(*arguments)
    torch.testing.assert_close(specified.chances, chances, rtol=1e-6, atol=0)
    if specified.rows.lens == lens and all(map(torch.equal, specified.trees[:3], trees[:3])):  # but for rounding
        assert specified.depth == depth and specified.promised == pytest.approx(promised)


def verified(requests: int, depths: int, candidates: int, seed: int) -> tuple[list[int], ops.PlannedRows, torch.Tensor]:
    """Which requests of a batch were drafted, the rows that were verified, and random paths through them."""
    random = torch.Generator().manual_seed(seed)
    drafted = [2 * request + 1 for request in range(requests)]
    trees = KERNELS.plans.best_first(make_chances(requests, depths, candidates, "any", seed), 8)
    most = (trees.reaches > 0).sum(1).tolist()
    lens = [int(torch.randint(1, count + 1, (1,), generator=random)) for count in most]
    rows = KERNELS.plans.take_rows(trees, drafted, lens, 2 * requests + 1)
    path = rows.row_starts[:-1, None].repeat(1, rows.length)
    for request in drafted:
        first, end = rows.row_starts[request : request + 2].tolist()
        at = 0
        for row in range(1, end - first):
            if int(rows.parents[first + row]) == at and torch.rand(1, generator=random) < 0.6:
                at = row
                path[request, int(rows.depths[first + row]) :] = first + row
    return drafted, rows, path


@NATIVE
@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(st.integers(0, 4), max_size=3),
    depths=st.integers(1, 5),
    candidates=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_what_is_learned_is_the_specification(requests, depths, candidates, seed):
    """Fails where a row teaches another parameter, a row behind a rejected one teaches at all, bounds are left, or
    several lessons at once teach anything else than one after the other. requests: of each lesson."""
    random = torch.Generator().manual_seed(seed)
    lessons = []
    for count in requests:
        drafted, rows, path = verified(count, depths, candidates, seed + len(lessons))
        log_probs = torch.rand((count, depths, candidates), generator=random).log() * (1 + seed % 3)
        log_probs[torch.rand(log_probs.shape, generator=random) < 0.1] = [-torch.inf, torch.nan][seed % 2]
        places = torch.randperm(6, generator=random)[:count].tolist()
        lessons.append(ops.Lesson(places, drafted, rows, path, log_probs))
    expected, got = parameters(depths + seed % 2, 6, seed), parameters(depths + seed % 2, 6, seed)
    tuning = PlattTuning(slope_prior=0.1, damping=0.5 + seed % 4)
    platt_scaling.platt_steps(*expected, lessons, tuning)
    KERNELS.plans.platt_steps(*got, lessons, tuning)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert ours.isfinite().all()


@BODIES
def test_one_observation(body):
    """Fails where a Newton step has another size or sign, or a parameter without a part in the row moves."""
    shared, own = parameters(2, 2, 7)
    before, own_before = shared.clone(), own.clone()
    rows = KERNELS.plans.take_rows(KERNELS.plans.best_first(torch.tensor([[[0.9, 0.8], [0.1, 0.0]]]), 3), [0], [3], 1)
    assert rows.ranks.tolist() == [-1, 0, 1] and rows.depths.tolist() == [0, 1, 1]
    tuning, log_probs = PlattTuning(), torch.tensor([[[-0.7, -1.5], [-0.2, -3.0]]])
    only_first = rows._replace(row_starts=torch.tensor([0, 2]), parents=rows.parents[:2], depths=rows.depths[:2])
    only_first = only_first._replace(ranks=rows.ranks[:2])
    body.platt_steps(shared, own, [ops.Lesson([1], [0], only_first, torch.tensor([[0, 1]]), log_probs)], tuning)
    x = platt_scaling.logit(-0.7, 12.0)
    chance = 1 / (1 + math.exp(-float(before[SLOPE, 0] * x + before[DEPTHS, 0] + own_before[1, 0])))
    information = chance * (1 - chance) + 1e-4
    kept = float(before[DEPTHS, 1]) * (1 - 1 / 512) + information
    assert float(shared[DEPTHS, 1]) == pytest.approx(kept, rel=1e-6)
    assert float(shared[DEPTHS, 0]) == pytest.approx(
        float(before[DEPTHS, 0]) + 0.5 * (1 - chance) / (kept + 2), rel=1e-6
    )
    assert float(own[1, 0]) > float(own_before[1, 0]) and torch.equal(own[0], own_before[0])
    assert torch.equal(shared[OTHERS], before[OTHERS]) and torch.equal(shared[DEPTHS + 1], before[DEPTHS + 1])
    assert (float(shared[SLOPE, 0]) > float(before[SLOPE, 0])) == (x > 0)


@NATIVE
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"places": [0], "drafted": [1]}, "need more than 1 places"),
        ({"places": [0, 1, 2], "drafted": [1, 3, 4]}, "of 2 requests, but there are 3 places"),
        ({"places": [0, 6]}, "a place is 6; allowed: -1 .. 5"),
        ({"places": [0, -1]}, "request 3 of 5 has the place -1"),
        ({"drafted": [1, 7]}, "request 7 of 5"),
        ({"drafted": [1]}, "1 drafted requests, 2 places"),
        ({"path": torch.full((5, 3), 99)}, "holds row"),
        ({"path": torch.zeros(3, 3, dtype=torch.int64)}, r"int64 of \[5, L\]"),
        ({"shared": torch.zeros(3, 2, dtype=torch.float64)}, "3 shared parameters for 2 depths"),
        ({"own": torch.zeros(6, 2)}, r"float64 of \[P, 2\]"),
        ({"log_probs": torch.zeros(2, 2, 2).mT}, r"\[b, D, k\]"),
        ({"tuning": (1.0,)}, "8 are needed"),
    ],
)
def test_wrong_lessons_are_refused(change, words):
    """Fails where memory outside of the parameters or rows is read or written."""
    _, rows, path = verified(2, 2, 2, 3)
    shared, own = parameters(2, 6, 0)
    arguments = {"shared": shared, "own": own, "places": [0, 3], "drafted": [1, 3], "rows": rows, "path": path}
    arguments |= {"log_probs": torch.full((2, 2, 2), -1.0), "tuning": PlattTuning()}

    def learn(shared, own, tuning, **lesson):
        KERNELS.plans.platt_steps(shared, own, [ops.Lesson(**lesson)], tuning)

    learn(**arguments)
    with pytest.raises(RuntimeError, match=words):
        learn(**arguments | change)


@NATIVE
@pytest.mark.parametrize("short", range(5))
def test_lessons_of_unequal_parts_are_refused(short):
    """Fails where a list is read beyond its end."""
    drafted, rows, path = verified(2, 2, 2, 3)
    tables, log_probs = parameters(2, 6, 0), torch.full((2, 2, 2), -1.0)
    fields = [[field] * 2 for field in (rows.row_starts, rows.parents, rows.depths, rows.ranks, path)]
    requests = [0, 3] * 2, drafted * 2
    torch.ops.sglang_dflash.platt_steps(*tables, *requests, *fields, [log_probs] * 2, PlattTuning())
    fields[short].pop()
    with pytest.raises(RuntimeError, match="a list has 1 of 2 steps"):
        torch.ops.sglang_dflash.platt_steps(*tables, *requests, *fields, [log_probs] * 2, PlattTuning())


@NATIVE
def test_their_schemas_are_right():
    """Fails where an op changes an argument, or returns one, and its schema does not say so."""
    native, (drafted, rows, path) = torch.ops.sglang_dflash, verified(2, 2, 2, 3)
    shared, own = parameters(2, 6, 0)
    log_probs = torch.full((2, 2, 2), -1.0)
    fields = [rows.row_starts], [rows.parents], [rows.depths], [rows.ranks], [path], [log_probs]
    calls = {
        native.platt: (log_probs, shared, own, [0, -1], 12.0),
        native.platt_steps: (shared, own, [0, 3], drafted, *fields, list(PlattTuning())),
    }
    for call, arguments in calls.items():
        torch.library.opcheck(call.default, arguments, test_utils=("test_schema",))

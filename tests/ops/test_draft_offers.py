"""Whom to draft next, by what recent drafts offered."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import NATIVE, make_chances

from sglang_dflash import ops
from sglang_dflash.ops import BestWidth, Offers, StepCosts, draft_offers, planning

KERNELS = ops.choose_kernels("cpu", torch.float32)

BODIES = pytest.mark.parametrize(
    "body", [draft_offers, pytest.param(KERNELS.plans, marks=NATIVE)], ids=["spec", "native"]
)
PLACES, STEPS, ROWS, DEPTHS = 5, 3, 6, 4
COSTS = StepCosts(gap_s=0.5, draft_fixed_s=1.0, draft_row_s=0.25, rest_fixed_s=2.0, rest_row_s=0.5)


def empty() -> Offers:
    return Offers.none(PLACES, STEPS, ROWS, DEPTHS)


def keep(offers: Offers, places: list[int], chances: torch.Tensor, weight: float) -> None:
    """The places offer their best rows by these chances; nothing of them is verified."""
    own = ops.PlanTables.none(PLACES, STEPS, ROWS + 1, DEPTHS, len(places))._replace(offers=offers)
    everyone = list(range(len(places)))
    log_probs = chances.clamp(1e-30, 1 - 1e-7).log()  # a certain draft stays within the logits' bounds
    planning.plan_rows(log_probs, own, 0, [-1] * len(places), 80.0, 2.0, everyone, len(places))
    planning.learn_steps(own, [places], [torch.arange(len(places))[:, None]], ops.PlattTuning(), weight, 0.5)


def chains(offers: Offers, place: int, *reaches: float) -> None:
    """The place offers a chain, once more."""
    offers.depths[place, int(offers.kept[place]) % STEPS] = torch.arange(1, ROWS + 1, dtype=torch.int32)
    offers.reaches[place, int(offers.kept[place]) % STEPS] = torch.tensor([*reaches, *[0.0] * (ROWS - len(reaches))])
    offers.drafted[place, int(offers.kept[place]) % STEPS] = DEPTHS
    offers.kept[place] += 1


@BODIES
def test_by_hand(body):
    """Fails where a row that is not worth its time counts, or the draft's own time is left out."""
    offers = empty()
    chains(offers, 3, 0.9, 0.8, 0.3, 0.1)
    # A row costs 0.5 s, which is worth 0.25 tokens: three of four rows pay.
    best = body.best_width(offers, [3], [], 1.0, COSTS, 0.5)
    plain_s = 0.5 + 2.0 + 0.5
    rates = {w: (1 + sum((0.9, 0.8, 0.3)[: w - 1])) / (plain_s + 1 + 0.25 * w + 0.5 * (w - 1)) for w in (2, 3, 4)}
    width = max(rates, key=rates.__getitem__)
    assert (best.width, best.requests) == (width, [0]) and best.tokens / best.seconds == pytest.approx(rates[width])


@BODIES
def test_who_is_left_out(body):
    """Fails where a request without a chance is drafted beside one with, or where its time is still counted."""
    offers = empty()
    chains(offers, 0, 0.9, 0.9, 0.9, 0.9)
    chains(offers, 1, 0.1, 0.01)
    alone = body.best_width(offers, [0], [], 1.0, COSTS, 0.5)
    both = body.best_width(offers, [1, 0], [], 1.0, COSTS, 0.5)
    assert alone.requests == [0] and both.requests == [1] and both.width == alone.width
    assert both.tokens == pytest.approx(alone.tokens + 1) and both.seconds == pytest.approx(alone.seconds + 0.5)
    assert body.best_width(offers, [1], [], 1.0, COSTS, 0.5) == BestWidth(1, [], 1.0, 3.0)


@BODIES
def test_an_unknown_request_is_like_the_others(body):
    """Fails where nothing is expected of a request that was never drafted, or the others outweigh its own steps."""
    offers = empty()
    for place in (0, 1):
        chains(offers, place, 0.9, 0.9, 0.9, 0.9)
    for _ in range(STEPS):
        chains(offers, 2, 0.2)
    assert body.best_width(offers, [-1, 2], [0, 1], 0.1, COSTS, 0.5).requests == [0]
    assert body.best_width(offers, [-1, -1], [], 1.0, COSTS, 0.5).width == 1
    assert body.best_width(offers, [2], [0, 1], 100.0, COSTS, 0.5).requests == [0]


@BODIES
def test_beyond_a_narrow_block(body):
    """Fails where a request whose blocks were narrow can never get wider ones."""
    offers = empty()
    for _ in range(200):
        keep(offers, [0], torch.full((1, DEPTHS, 1), 0.9), 0.1)
    for _ in range(STEPS):
        keep(offers, [0], torch.full((1, 1, 1), 0.9), 0.1)
    best = body.best_width(offers, [0], [], 1.0, COSTS, 0.2)
    assert best.width == DEPTHS + 1
    assert best.tokens == pytest.approx(1 + 0.9 + 0.9**2 + 0.9**3 + 0.9**4, rel=1e-3)


@BODIES
def test_a_good_narrow_block_promises_good_depths(body):
    """Fails where depths that were not drafted have the mean chance for a request that is better, or worse, than it."""
    offers = empty()
    for _ in range(200):
        keep(offers, [0], torch.full((1, DEPTHS, 1), 0.5), 0.1)  # others' chances
    free = StepCosts(gap_s=0.5, draft_fixed_s=0.1, draft_row_s=0.0, rest_fixed_s=2.0, rest_row_s=0.0)
    for place, chance, deeper in ((1, 0.8, 2 / 3), (2, 0.2, 1 / 3)):
        keep(offers, [place], torch.full((1, 2, 1), chance), 0.0)
        tokens = 1 + chance + chance**2 * (1 + deeper + deeper**2)
        assert body.best_width(offers, [place], [], 1.0, free, 0.1).tokens == pytest.approx(tokens, rel=1e-4)


@NATIVE
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 9999))
def test_the_specification(seed):
    """Fails where the native op chooses anything else than the specification."""
    chance, offers = random.Random(seed), empty()
    for step in range(chance.randrange(12)):
        places = chance.sample(range(PLACES), chance.randrange(1, PLACES + 1))
        keep(offers, places, make_chances(len(places), chance.randrange(1, DEPTHS + 1), 3, "any", seed + step), 0.25)
    known = [place for place in range(PLACES) if offers.kept[place] > 0]
    batch = chance.sample(range(PLACES), chance.randrange(1, PLACES)) + [-1] * chance.randrange(2)
    others = chance.sample(known, chance.randrange(len(known) + 1))
    costs = StepCosts(*(chance.random() for _ in range(5)))
    arguments = batch, others, chance.choice([0.5, 1.0, 3.0]), costs, chance.choice([0.0, 0.1, 0.5, 1.0, 4.0])
    one, other = draft_offers.best_width(offers, *arguments), KERNELS.plans.best_width(offers, *arguments)
    assert (other.width, other.requests) == (one.width, one.requests)
    assert (other.tokens, other.seconds) == pytest.approx((one.tokens, one.seconds))


@NATIVE
def test_wrong_tables_are_refused():
    """Fails where the native op reads beyond a table."""
    offers = empty()
    with pytest.raises(RuntimeError, match="a place is 5"):
        KERNELS.plans.best_width(offers, [0], [PLACES], 1.0, COSTS, 0.5)
    with pytest.raises(RuntimeError, match="kept is"):
        KERNELS.plans.best_width(offers._replace(kept=offers.kept[1:]), [0], [], 1.0, COSTS, 0.5)
    with pytest.raises(RuntimeError, match="contiguous"):
        KERNELS.plans.best_width(offers._replace(reaches=torch.zeros(PLACES, ROWS, STEPS).mT), [0], [], 1.0, COSTS, 0.5)

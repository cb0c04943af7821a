"""What is remembered of recent drafts, and whom to draft next."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import NATIVE, make_chances

from sglang_dflash import ops
from sglang_dflash.ops import BestWidth, Offers, StepCosts, draft_offers

KERNELS = ops.choose_kernels("cpu", torch.float32)

BODIES = pytest.mark.parametrize(
    "body", [draft_offers, pytest.param(KERNELS.plans, marks=NATIVE)], ids=["spec", "native"]
)
PLACES, STEPS, ROWS, DEPTHS = 5, 3, 6, 4
COSTS = StepCosts(gap_s=0.5, draft_fixed_s=1.0, draft_row_s=0.25, rest_fixed_s=2.0, rest_row_s=0.5)


def empty() -> Offers:
    return Offers.none(PLACES, STEPS, ROWS, DEPTHS)


def offered(places: list[int], chances: torch.Tensor) -> ops.OfferedStep:
    return ops.OfferedStep(places, chances, KERNELS.plans.best_first(chances, ROWS + 1))


def keep(body, offers: Offers, places: list[int], depths: int, seed: int, weight: float = 0.25) -> ops.Trees:
    step = offered(places, make_chances(len(places), depths, 3, "any", seed))
    body.keep_offers(offers, [step], weight, 0.5)
    return step.trees


def chains(offers: Offers, place: int, *reaches: float) -> None:
    """The place offers a chain, once more."""
    parents = torch.arange(-1, ROWS, dtype=torch.int32)[None]
    chain = torch.zeros(1, ROWS + 1)
    chain[0, : len(reaches) + 1] = torch.tensor([1.0, *reaches])
    trees = ops.Trees(parents, parents + 1, parents, chain)
    draft_offers.keep_offers(offers, [ops.OfferedStep([place], torch.zeros(1, DEPTHS, 1), trees)], 0.0, 0.0)


@BODIES
def test_the_oldest_offer_makes_room(body):
    """Fails where a request forgets its newest step, or takes the place of another."""
    offers = empty()
    trees = [keep(body, offers, [2, 0], DEPTHS, seed) for seed in range(STEPS + 1)]
    assert offers.kept.tolist() == [STEPS + 1, 0, STEPS + 1, 0, 0]
    for step, seed in ((0, STEPS), (1, 1), (2, 2)):
        for i, place in enumerate([2, 0]):
            assert torch.equal(offers.reaches[place, step], trees[seed].reaches[i, 1:])
            assert torch.equal(offers.depths[place, step], trees[seed].depths[i, 1:])
    assert not offers.reaches[[1, 3, 4]].any()


@BODIES
def test_what_is_kept_of_a_narrow_block(body):
    """Fails where depths that were not drafted change, or where the chance to come through is of one depth only."""
    offers = empty()
    chances = torch.tensor([[[0.5, 0.1], [0.8, 0.1]], [[0.3, 0.1], [0.4, 0.1]]])
    body.keep_offers(offers, [offered([4, 1], chances)], 0.5, 0.0)
    assert offers.deep.tolist() == pytest.approx([0.7, 0.8, 1.0, 1.0])
    assert offers.through[[4, 1], 0].tolist() == pytest.approx([0.4, 0.12])
    assert offers.drafted[[4, 1], 0].tolist() == [2, 2]


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
    body.keep_offers(offers, [offered([0], torch.full((1, DEPTHS, 1), 0.9))] * 200, 0.1, 0.5)
    body.keep_offers(offers, [offered([0], torch.full((1, 1, 1), 0.9))] * STEPS, 0.1, 0.5)
    best = body.best_width(offers, [0], [], 1.0, COSTS, 0.2)
    assert best.width == DEPTHS + 1
    assert best.tokens == pytest.approx(1 + 0.9 + 0.9**2 + 0.9**3 + 0.9**4, rel=1e-3)


@BODIES
def test_a_good_narrow_block_promises_good_depths(body):
    """Fails where depths that were not drafted have the mean chance for a request that is better, or worse, than it."""
    offers = empty()
    body.keep_offers(offers, [offered([0], torch.full((1, DEPTHS, 1), 0.5))] * 200, 0.1, 0.5)  # others' chances
    narrow = [offered([place], torch.full((1, 2, 1), chance)) for place, chance in ((1, 0.8), (2, 0.2))]
    body.keep_offers(offers, narrow, 0.0, 0.5)
    assert offers.odds[[1, 2], 0].tolist() == pytest.approx([2.0, 0.5], rel=1e-4)  # the odds are 4 and 1 / 4
    free = StepCosts(gap_s=0.5, draft_fixed_s=0.1, draft_row_s=0.0, rest_fixed_s=2.0, rest_row_s=0.0)
    for place, chance, deeper in ((1, 0.8, 2 / 3), (2, 0.2, 1 / 3)):
        tokens = 1 + chance + chance**2 * (1 + deeper + deeper**2)
        assert body.best_width(offers, [place], [], 1.0, free, 0.1).tokens == pytest.approx(tokens, rel=1e-4)


@NATIVE
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 9999))
def test_the_specification(seed):
    """Fails where the native ops keep or choose anything else than the specification, several steps at once or not."""
    chance = random.Random(seed)
    expected, got = empty(), empty()
    steps = []
    for step in range(chance.randrange(12)):
        places = chance.sample(range(PLACES), chance.randrange(1, PLACES + 1))  # the mean of no chance is none
        chances = make_chances(len(places), chance.randrange(1, DEPTHS + 1), 3, "any", seed + step)
        steps.append(offered(places, chances))
    draft_offers.keep_offers(expected, steps, 0.25, 0.5)
    half = chance.randrange(len(steps) + 1)
    for some in (steps[:half], steps[half:]):
        KERNELS.plans.keep_offers(got, some, 0.25, 0.5)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)
    got = Offers(*(table.clone() for table in expected))  # the same bits for the choice
    known = [place for place in range(PLACES) if expected.kept[place] > 0]
    batch = chance.sample(range(PLACES), chance.randrange(1, PLACES)) + [-1] * chance.randrange(2)
    others = chance.sample(known, chance.randrange(len(known) + 1))
    costs = StepCosts(*(chance.random() for _ in range(5)))
    arguments = batch, others, chance.choice([0.5, 1.0, 3.0]), costs, chance.choice([0.0, 0.1, 0.5, 1.0, 4.0])
    one, other = draft_offers.best_width(expected, *arguments), KERNELS.plans.best_width(got, *arguments)
    assert (other.width, other.requests) == (one.width, one.requests)
    assert (other.tokens, other.seconds) == pytest.approx((one.tokens, one.seconds))


@NATIVE
def test_wrong_tables_are_refused():
    """Fails where the native ops write or read beyond a table."""
    offers, chances = empty(), make_chances(2, DEPTHS, 3, "any", 0)
    trees = KERNELS.plans.best_first(chances, ROWS + 1)
    before = copy.deepcopy(offers)
    for places, wrong, rows, message in (
        ([0, PLACES], chances, trees, "a place is 5"),
        ([-1, 0], chances, trees, "a place is -1"),
        ([0], chances, trees, "need more than 1 places"),
        ([0, 1, 2], chances, trees, "of 2 requests, but there are 3 places"),
        ([0, 1], chances[0], trees, "3 dimensions are needed"),
        ([0, 1], make_chances(2, DEPTHS + 1, 3, "any", 0), trees, "up to 4"),
        ([0, 1], chances, KERNELS.plans.best_first(chances, ROWS), "trees are"),
    ):
        with pytest.raises(RuntimeError, match=message):
            KERNELS.plans.keep_offers(offers, [ops.OfferedStep(places, wrong, rows)], 0.1, 0.5)
    for counts in ((1, 2), (2, 1)):
        with pytest.raises(RuntimeError, match="a list has 1 of 2 steps"):
            lists = [trees.reaches] * counts[0], [trees.depths] * counts[1]
            torch.ops.sglang_dflash.keep_offers(*offers, [0, 1, 2, 3], [chances] * 2, *lists, 0.1, 0.5)
    assert all(map(torch.equal, offers, before))
    with pytest.raises(RuntimeError, match="a place is 5"):
        KERNELS.plans.best_width(offers, [0], [PLACES], 1.0, COSTS, 0.5)
    with pytest.raises(RuntimeError, match="kept is"):
        KERNELS.plans.best_width(offers._replace(kept=offers.kept[1:]), [0], [], 1.0, COSTS, 0.5)
    with pytest.raises(RuntimeError, match="contiguous"):
        KERNELS.plans.best_width(offers._replace(reaches=torch.zeros(PLACES, ROWS, STEPS).mT), [0], [], 1.0, COSTS, 0.5)

"""The rows that a plan verifies, and what drafted steps teach it: calibration, offers and counts by depth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import NATIVE, make_chances

from sglang_dflash import ops
from sglang_dflash.ops import planning, platt_scaling
from sglang_dflash.ops.planning import Block
from sglang_dflash.ops.platt_scaling import DEPTHS, OTHERS, SLOPE, PlattTuning

KERNELS = ops.choose_kernels("cpu", torch.float32)
BODIES = pytest.mark.parametrize("body", [planning, pytest.param(KERNELS.plans, marks=NATIVE)], ids=["spec", "native"])
PLACES, STEPS, ROWS, MOST, BLOCKS = 6, 3, 7, 5, 24
TUNING = PlattTuning()


def make_tables(seed: int = 0, depths: int = MOST, rows: int = ROWS) -> ops.PlanTables:
    """With parameters at random."""
    tables, random = ops.PlanTables.none(PLACES, STEPS, rows, depths, BLOCKS), torch.Generator().manual_seed(seed)
    for parameters in tables[:2]:
        parameters.copy_(torch.randn(parameters.shape, generator=random))
        parameters[:, 1] = parameters[:, 1].abs() * 9
    tables.shared[SLOPE, 0] = tables.shared[SLOPE, 0].abs() + 0.2
    tables.own_by_depth.copy_(torch.randint(9, tables.own_by_depth.shape, generator=random))
    return tables


def honest(depths: int = MOST) -> ops.PlanTables:
    """Whose chances are the draft's probabilities."""
    return ops.PlanTables.none(PLACES, STEPS, ROWS, depths, BLOCKS)


def all_of(tables: ops.PlanTables) -> tuple[torch.Tensor, ...]:
    return tables.shared, tables.own, *tables.offers, tables.by_depth, tables.own_by_depth


def copied(tables: ops.PlanTables) -> ops.PlanTables:
    offers = ops.Offers(*(table.clone() for table in tables.offers))
    return ops.PlanTables(*(offers if table is tables.offers else table.clone() for table in tables))


def every_other(count: int) -> list[int]:
    return [2 * request + 1 for request in range(count)]


def plan(body, tables: ops.PlanTables, chances: torch.Tensor, first: int = 0, least: float = 0.0) -> ops.PlannedRows:
    """Every other request is drafted, with these probabilities."""
    log_probs, count = chances.log(), len(chances)
    return body.plan_rows(log_probs, tables, first, [-1] * count, 80.0, least, every_other(count), 2 * count + 1)


def follow(rows: ops.PlannedRows, seed: int) -> torch.Tensor:
    """Paths of a target that takes each row on a path with a chance of 0.6."""
    random, path = torch.Generator().manual_seed(seed), rows.row_starts[:-1, None].repeat(1, rows.length)
    for request, first in enumerate(rows.row_starts[:-1].tolist()):
        at = 0
        for row in range(1, rows.lens[request]):
            if int(rows.parents[first + row]) == at and torch.rand(1, generator=random) < 0.6:
                at = row
                path[request, int(rows.depths[first + row])] = first + row
    return path


def learn(body, tables: ops.PlanTables, places: Sequence[int], *paths, weight: float = 0.25, share: float = 0.5):
    """places: those of each step's requests."""
    return body.learn_steps(tables, [list(places)] * len(paths), list(paths), TUNING, weight, share)


@BODIES
@settings(max_examples=100, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 4), st.integers(1, MOST), st.integers(1, 4)),
    least=st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    seed=st.integers(0, 99),
)
def test_the_rows_of_a_plan(body, shape, least, seed):
    """Fails where one op for a whole plan gives other rows than its parts, leaves a request without its anchor or a
    copy without its chain, or writes anything else into the table of blocks."""
    random = torch.Generator().manual_seed(seed)
    log_probs = (torch.rand(shape, generator=random).log() * 2).sort(-1, descending=True).values
    log_probs[torch.rand(shape, generator=random) < 0.05] = -torch.inf
    log_probs = log_probs.sort(-1, descending=True).values
    tables, places = make_tables(seed), torch.randint(-1, PLACES, (shape[0],), generator=random).tolist()
    drafted, batch, first = every_other(shape[0]), 2 * shape[0] + 1, seed % 5
    copies = ([0], [9]) if seed % 3 == 0 else ([], [])
    before = copied(tables)
    rows = body.plan_rows(log_probs, tables, first, places, 9.0, least, drafted, batch, *copies)
    chances = platt_scaling.platt(log_probs, tables.shared, tables.own, places, 9.0)
    if body is not planning:
        chances = body.platt(log_probs, tables.shared, tables.own, places, 9.0)
    trees = KERNELS.plans.best_first(chances, ROWS)
    lens = planning.rows_that_pay(trees.reaches, batch + sum(copies[1]) - len(copies[1]), least)
    expected = KERNELS.plans.take_rows(trees, drafted, lens, batch, *copies)
    assert rows.lens == expected.lens and rows[8:] == expected[8:]
    assert all(map(torch.equal, rows[:6], expected[:6]))
    assert (rows.row_mask is None) == (expected.row_mask is None) and torch.equal(rows.seen(), expected.seen())
    for i, request in enumerate(drafted):
        block = Block.of(tables.blocks, first + i, MOST)
        assert block.head.tolist() == [request, int(rows.row_starts[request]), lens[i], shape[1]]
        assert all(map(torch.equal, block[1:5], (field[i].float() for field in trees)))
        proposed = trees.ranks[i] >= 0
        assert torch.equal(block.said[proposed], log_probs[i, trees.depths[i][proposed] - 1, trees.ranks[i][proposed]])
        assert not block.said[~proposed].any() and torch.equal(block.first[: shape[1]], chances[i, :, 0])
    others = torch.ones(BLOCKS, dtype=torch.bool)
    others[first : first + shape[0]] = False
    assert torch.equal(tables.blocks[others], before.blocks[others])
    assert all(map(torch.equal, all_of(tables), all_of(before)))


@settings(max_examples=150, deadline=None)
@given(
    trees=st.lists(st.lists(st.floats(1 / 64, 1.0, width=32), max_size=3), min_size=1, max_size=3),
    besides=st.integers(3, 8),
    least=st.sampled_from([0.0, 0.05, 0.2, 0.3, 0.5, 0.8, 1.0]),
)
def test_no_other_rows_bring_more(trees, besides, least):
    """Fails where other numbers of rows bring more tokens beyond the price of their time, or as many with fewer."""

    def surplus(lens: Sequence[int]) -> float:
        count = besides + sum(lens) - len(lens)
        groups = -(-count // planning.ROW_GROUP) + besides // -planning.ROW_GROUP
        cost = planning.ROW_SHARE * (count - besides) + (1 - planning.ROW_SHARE) * planning.ROW_GROUP * groups
        return sum(sum(tree[: taken - 1]) for tree, taken in zip(trees, lens, strict=True)) - least * cost

    trees = [sorted(tree, reverse=True) for tree in trees]
    reaches = torch.tensor([[1.0, *tree, *[0.0] * (3 - len(tree))] for tree in trees])
    taken = planning.rows_that_pay(reaches, besides, least)
    assert all(1 <= count <= 1 + len(tree) for count, tree in zip(taken, trees, strict=True)), taken
    others = list(itertools.product(*(range(1, len(tree) + 2) for tree in trees)))
    assert surplus(taken) == pytest.approx(max(map(surplus, others)), abs=1e-6)
    if least > 0:
        assert not any(surplus(rows) >= surplus(taken) and sum(rows) < sum(taken) for rows in others)
    else:
        assert sum(taken) == len(trees) + sum(map(len, trees))


def test_started_groups_are_filled():
    """With a price of 0.5, a row of 0.2 pays where it fills a group, not where it starts one. Three likely rows start a
    group together; a row of 0.2 fills it, one of 0.05 does not."""
    reaches = torch.tensor([[1.0, 0.9, 0.8], [1.0, 0.2, 0.1], [1.0, 0.9, 0.05]])
    assert planning.rows_that_pay(reaches[1:2], 3, 0.5) == [2]
    assert planning.rows_that_pay(reaches[1:2], 4, 0.5) == [1]
    assert planning.rows_that_pay(reaches, 4, 0.5) == [3, 2, 2]
    assert planning.rows_that_pay(reaches[::2], 4, 0.5) == [3, 2]


@NATIVE
@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.integers(1, 4), max_size=5),
    depths=st.integers(1, MOST),
    candidates=st.integers(1, 4),
    seed=st.integers(0, 999),
)
def test_what_is_learned_is_the_specification(requests, depths, candidates, seed):
    """Fails where a row teaches another parameter, a row behind a rejected one teaches at all, bounds are left, another
    offer is kept, a row counts at another depth, several steps at once teach anything else than one after the other, or
    what another request has left counts for a new one.
    requests: of each step."""
    random = torch.Generator().manual_seed(seed)
    expected, in_turn = make_tables(seed, depths), make_tables(seed, depths)
    places, paths, starts, first = [], [], [], 0
    for count in requests:
        filled = int(torch.randint(1, depths + 1, (1,), generator=random))
        chances = make_chances(count, filled, candidates, "any", seed + first)
        rows = plan(KERNELS.plans, expected, chances, first, least=0.02 * (seed % 4))
        for i in range(count):
            noise = torch.rand(ROWS, generator=random)
            said = torch.where(noise < 0.1, [-torch.inf, torch.nan][seed % 2], noise.log() * (1 + seed % 3))
            Block.of(expected.blocks, first + i, depths).said.copy_(said)
        places.append(torch.randperm(PLACES, generator=random)[:count].tolist())
        paths.append(follow(rows, seed))
        starts.append(first)
        first += count
    got = copied(expected)
    tuning = PlattTuning(slope_prior=0.1, damping=0.5 + seed % 4), 0.25, 0.5
    new = places[0][: seed % 3] if places else []
    sums = planning.learn_steps(expected, places, paths, *tuning, new)
    together = KERNELS.plans.learn_steps(got, places, paths, *tuning, new)
    for own_places, path, start in zip(places, paths, starts, strict=True):
        one = in_turn._replace(blocks=got.blocks[start:])
        KERNELS.plans.learn_steps(one, [own_places], [path], *tuning, new if start == 0 else [])
    for ours, theirs, one_by_one in zip(all_of(got), all_of(expected), all_of(in_turn), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert torch.equal(ours, one_by_one) and ours.isfinite().all()
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert together == pytest.approx(sums)
    rows, promised, accepted = got.by_depth.sum(0).tolist()
    assert (rows, accepted) == (together.rows, together.accepted) and promised == pytest.approx(together.promised)


@BODIES
def test_one_observation(body):
    """Fails where a Newton step has another size or sign, or a parameter without a part in the row moves."""
    tables = make_tables(7, 2)
    block = Block.of(tables.blocks, 0, 2)
    KERNELS.plans.plan_rows(torch.tensor([[[-0.7, -1.5], [-0.2, -3.0]]]), tables, 0, [1], 12.0, 2.0, [0], 1)
    block.head[2] = 2  # the anchor and one row are verified
    assert (block.parents[1], block.depths[1], block.ranks[1], block.said[1]) == (0, 1, 0, pytest.approx(-0.7))
    before = copied(tables)
    learn(body, tables, [1], torch.tensor([[0, 1]]))
    (shared, own, *_), (shared_before, own_before, *_) = tables, before
    x = platt_scaling.logit(float(block.said[1]), 12.0)
    chance = 1 / (1 + math.exp(-float(shared_before[SLOPE, 0] * x + shared_before[DEPTHS, 0] + own_before[1, 0])))
    information = chance * (1 - chance) + 1e-4
    kept = float(shared_before[DEPTHS, 1]) * (1 - 1 / 512) + information
    assert float(shared[DEPTHS, 1]) == pytest.approx(kept, rel=1e-6)
    assert float(shared[DEPTHS, 0]) == pytest.approx(
        float(shared_before[DEPTHS, 0]) + 0.5 * (1 - chance) / (kept + 2), rel=1e-6
    )
    assert float(own[1, 0]) > float(own_before[1, 0]) and torch.equal(own[0], own_before[0])
    assert torch.equal(shared[OTHERS], shared_before[OTHERS])
    assert torch.equal(shared[DEPTHS + 1], shared_before[DEPTHS + 1])
    assert (float(shared[SLOPE, 0]) > float(shared_before[SLOPE, 0])) == (x > 0)


@BODIES
def test_rows_are_counted_by_depth(body):
    """Fails where a row counts at another depth than its own, or where a row that was not verified, an anchor or a
    request without a draft counts. Two requests have trees; the second verifies its anchor and one row."""
    tables = ops.PlanTables.none(PLACES, STEPS, 4, 3, 4)
    for first in (0, 2):
        one, other = (Block.of(tables.blocks, first + i, 3) for i in range(2))
        for block, head, parents, depths, reaches in (
            (one, [0, 0, 4, 3], [-1, 0, 0, 1], [0, 1, 1, 2], [1.0, 0.5, 0.25, 0.125]),
            (other, [2, 5, 2, 3], [-1, 0, 1, 2], [0, 1, 2, 3], [1.0, 0.75, 0.5, 0.25]),
        ):
            for column, values in zip(block, (head, parents, depths, [-1, 0, 1, 0], reaches), strict=False):
                column.copy_(torch.tensor(values))
            block.first.fill_(0.5)
    path = torch.tensor([[0, 1, 3], [4, 4, 4], [5, 6, 5]])  # the request between them has no draft
    assert learn(body, tables, [0, 1], path, path) == ops.VerifiedRows(8, 6, 3.25, 6)
    assert tables.by_depth.tolist() == [[6, 3.0, 4], [2, 0.25, 2], [0, 0, 0]]
    none = [0, 0, 0]
    assert tables.own_by_depth[:2].tolist() == [[[4, 1.5, 2], [2, 0.25, 2], none], [[2, 1.5, 2], none, none]]
    assert not tables.own_by_depth[2:].any()
    body.learn_steps(tables, [[1, 4]], [path], TUNING, 0.1, 0.5, [1])
    assert tables.own_by_depth[[1, 4]].tolist() == [[[2, 0.75, 1], [1, 0.125, 1], none], [[1, 0.75, 1], none, none]]


@BODIES
def test_the_oldest_offer_makes_room(body):
    """Fails where a request forgets its newest step, or takes the place of another."""
    tables = make_tables()
    paths = [
        follow(plan(KERNELS.plans, tables, make_chances(2, MOST, 3, "any", seed), 2 * seed), seed)
        for seed in range(STEPS + 1)
    ]
    learn(body, tables, [2, 0], *paths)
    offers = tables.offers
    assert offers.kept.tolist() == [STEPS + 1, 0, STEPS + 1, 0, 0, 0]
    for step, seed in ((0, STEPS), (1, 1), (2, 2)):
        for i, place in enumerate([2, 0]):
            block = Block.of(tables.blocks, 2 * seed + i, MOST)
            assert torch.equal(offers.reaches[place, step], block.reaches[1:])
            assert torch.equal(offers.depths[place, step].float(), block.depths[1:])
    assert not offers.reaches[[1, 3, 4, 5]].any()


@BODIES
def test_what_is_kept_of_a_narrow_block(body):
    """Fails where depths that were not drafted change, or where the chance to come through is of one depth only."""
    tables = honest(depths=4)
    path = follow(plan(body, tables, torch.tensor([[[0.5, 0.1], [0.8, 0.1]], [[0.3, 0.1], [0.4, 0.1]]])), 0)
    learn(body, tables, [4, 1], path, weight=0.5, share=0.0)
    assert tables.offers.deep.tolist() == pytest.approx([0.7, 0.8, 1.0, 1.0])
    assert tables.offers.through[[4, 1], 0].tolist() == pytest.approx([0.4, 0.12])
    assert tables.offers.drafted[[4, 1], 0].tolist() == [2, 2]


@BODIES
def test_a_good_narrow_block_promises_good_depths(body):
    """Fails where depths that were not drafted have the mean chance for a request that is better, or worse, than it."""
    tables = honest(depths=4)
    tables.offers.deep.fill_(0.5)  # others' chances
    for place, chance in ((1, 0.8), (2, 0.2)):
        path = follow(plan(body, tables, torch.full((1, 2, 1), chance)), 0)
        tables.shared.copy_(honest(depths=4).shared)
        learn(body, tables, [place], path, weight=0.0)
        tables.shared.copy_(honest(depths=4).shared)
    assert tables.offers.odds[[1, 2], 0].tolist() == pytest.approx([2.0, 0.5], rel=1e-4)  # the odds are 4 and 1 / 4


@NATIVE
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"places": [[0, PLACES]]}, "a place is 6; allowed: -1 .. 5"),
        ({"places": [[0, -1]]}, "a place is -1; allowed: 0 .. 5"),
        ({"places": [[0, 3], []], "paths": [torch.zeros(5, 1, dtype=torch.int64)] * 2}, "a step has 0 blocks"),
        ({"places": [[0, 3]] * 2}, "1 paths of 2 steps"),
        ({"places": [[0] * (BLOCKS + 1)]}, "25 blocks of 24"),
        ({"paths": [torch.full((5, 3), 99)]}, "holds row"),
        ({"paths": [torch.zeros(1, 3, dtype=torch.int64)]}, r"int64 of \[B, L\] is needed for request 1"),
        ({"paths": [torch.zeros(5, 3)]}, "path is Float"),
        ({"blocks": torch.zeros(4, 9)}, "which hold no rows"),
        ({"blocks": torch.zeros(4, 41).double()}, "dense float32"),
        ({"blocks": torch.zeros(4, 41, device="meta")}, "dense float32"),
        ({"paths": [torch.zeros(5, 3, dtype=torch.int64, device="meta")]}, "dense int64"),
        ({"own": torch.zeros(PLACES, 2, dtype=torch.float64, device="meta")}, "dense float64"),
        ({"block": (0, -1.0)}, "for request -1"),
        ({"block": (1, 3.0)}, "holds row"),
        ({"wrong": 1, "block": (1, 0.0)}, "holds row"),
        ({"block": (2, 8.0)}, "8 of 7 rows"),
        ({"block": (3, 3.0)}, "3 of 2 depths"),
        ({"block": (3, 0.0)}, "0 of 2 depths"),
        ({"block": (4 + 1, 1.0)}, "parent 1"),
        ({"block": (4 + ROWS + 1, 3.0)}, "depth 3"),
        ({"block": (4 + ROWS + 1, 0.0)}, "depth 0"),
        ({"shared": torch.zeros(3, 2, dtype=torch.float64)}, "which hold no rows beside 1 depths"),
        ({"own": torch.zeros(PLACES, 2)}, r"float64 of \[P, 2\]"),
        ({"own": torch.zeros(PLACES + 1, 2, dtype=torch.float64)}, "of 7 requests, .* offers of 6"),
        ({"offers": ops.Offers.none(PLACES, STEPS, ROWS, 2)}, "7 rows, offers of 6, 2 and 8"),
        ({"offers": ops.Offers.none(PLACES, STEPS, ROWS - 1, 1)}, "2 depths and 7 rows, offers of 6, 1 and 7"),
        ({"by_depth": torch.zeros(1, 3, dtype=torch.float64)}, r"float64 of \[2, 3\]"),
        ({"own_by_depth": torch.zeros(PLACES, 1, 3, dtype=torch.float64)}, r"float64 of \[6, 2, 3\]"),
        ({"own_by_depth": torch.zeros(PLACES, 2, 3)}, r"float64 of \[6, 2, 3\]"),
        ({"tuning": (1.0,)}, "10 are needed"),
        ({"new": [PLACES]}, "a place is 6"),
        ({"new": [-1]}, "a place is -1"),
    ],
)
def test_wrong_lessons_are_refused(change, words):
    """Fails where memory outside of the tables or rows is read or written."""
    tables = make_tables(depths=2)
    path = follow(plan(KERNELS.plans, tables, torch.full((2, 2, 2), 0.5)), 0)
    before = copied(tables)
    if "block" in change:
        column, value = change["block"]
        tables.blocks[change.get("wrong", 0), column] = value
    of_tables = {name: value for name, value in change.items() if name in ops.PlanTables._fields}
    arguments = change.get("places", [[0, 3]]), change.get("paths", [path]), change.get("tuning", TUNING), 0.1, 0.5
    with pytest.raises(RuntimeError, match=words):
        KERNELS.plans.learn_steps(tables._replace(**of_tables), *arguments, change.get("new", []))
    assert all(map(torch.equal, all_of(tables), all_of(before)))
    KERNELS.plans.learn_steps(before, [[0, 3]], [path], TUNING, 0.1, 0.5)


@NATIVE
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first_block": BLOCKS - 1}, "blocks 23 to 25 of 24"),
        ({"first_block": -1}, "blocks -1 to 1"),
        ({"drafted": [1]}, "1 drafted requests with 2"),
        ({"drafted": [1, 9]}, "tree 1 is of request 9"),
        ({"places": [0]}, "for 1 requests"),
        ({"log_probs": torch.zeros(2, 3, 2)}, "parameters of 2 depths for 3"),
        ({"log_probs": torch.zeros(2, 2, 2, device="meta")}, "dense float32"),
        ({"copied": [0], "copied_lens": []}, "0 lens for 1 copies"),
        ({"copied": [1], "copied_lens": [2]}, "request 1 is drafted and copied"),
        ({"copied": [5], "copied_lens": [2]}, "copy 0 is of request 5"),
        ({"copied": [2, 0], "copied_lens": [2, 2]}, "copy 1 is of request 0"),
        ({"copied": [2], "copied_lens": [0]}, "has 0 rows"),
    ],
)
def test_wrong_plans_are_refused(change, words):
    """Fails where memory outside of the tables or trees is read or written."""
    tables = make_tables(depths=2)
    arguments = {"log_probs": torch.full((2, 2, 2), -0.7), "tables": tables, "first_block": 0, "places": [0, -1]}
    arguments |= {"max_logit": 12.0, "least": 0.0, "drafted": [1, 3], "batch": 5, "copied": [0], "copied_lens": [4]}
    KERNELS.plans.plan_rows(**arguments)
    before = copied(tables)
    with pytest.raises(RuntimeError, match=words):
        KERNELS.plans.plan_rows(**arguments | change)
    assert torch.equal(tables.blocks, before.blocks)

"""The rows taken from trees and where they are laid out. Every body against another definition, and the native ones
against their specification."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import BODIES, NATIVE, assert_equal, make_chances, make_tables

from sglang_dflash import ops
from sglang_dflash.ops import PlannedRows, Trees, tree

KERNELS = ops.choose_kernels("cpu", torch.float32)


@st.composite
def plans(draw) -> tuple[Trees, list[int], list[int], int, list[int], list[int]]:
    """Trees of some requests, these requests, the rows to take of each tree, the number of all requests, those of the
    others that get copies, and the rows of each."""
    batch = draw(st.integers(1, 5))
    drafted = sorted(draw(st.sets(st.integers(0, batch - 1))))
    ranks, seed = draw(st.integers(1, 4)), draw(st.integers(0, 99))
    chances = make_chances(len(drafted), draw(st.integers(1, 6)), ranks, draw(st.sampled_from(["any", "ties"])), seed)
    trees = tree.best_first(chances, draw(st.integers(1, 12)))
    lens = [draw(st.integers(1, int((reaches > 0).sum()))) for reaches in trees.reaches]
    left = sorted(draw(st.sets(st.sampled_from(range(batch)), max_size=2)).difference(drafted))
    return trees, drafted, lens, batch, left, [draw(st.integers(1, 9)) for _ in left]


def assert_same_rows(got: PlannedRows, expected: PlannedRows) -> None:
    assert_equal(got[:6], expected[:6])
    assert (got.row_mask is None) == (expected.row_mask is None)
    if got.row_mask is not None:
        assert_equal((got.row_mask,), (expected.row_mask,))
    assert (got.lens, *got[8:]) == (expected.lens, *expected[8:])


@BODIES
@settings(max_examples=150, deadline=None)
@given(plan=plans())
def test_rows_are_taken_from_trees(body, plan):
    """Fails where a row is another tree's or another place's, a request without a tree gets more than its anchor or
    copy, a row sees what is not on its path, or chains get a mask."""
    trees, drafted, lens, batch, copied, copied_lens = plan
    rows = body.take_rows(*plan)
    expected, counts = [], [1] * batch
    for request in range(batch):
        own = [(-1, 0, -1)]
        if request in drafted:
            place = drafted.index(request)
            counts[request] = lens[place]
            own = list(zip(*(field[place, : lens[place]].tolist() for field in trees[:3]), strict=True))
        elif request in copied:
            counts[request] = copied_lens[copied.index(request)]
            own += [(row - 1, row, 0) for row in range(1, counts[request])]
        expected += [(*row, request) for row in own]
    assert list(zip(*(field.tolist() for field in rows[:4]), strict=True)) == expected
    assert [field.dtype for field in rows[:6]] == [torch.int32] * 3 + [torch.int64] * 2 + [torch.int32]
    assert rows.counts.tolist() == rows.lens
    assert rows.row_starts.tolist() == [sum(counts[:request]) for request in range(batch + 1)]
    assert (rows.lens, rows.width) == (counts, max(counts))
    assert rows.length == 1 + max(row[1] for row in expected)
    places = [index - int(rows.row_starts[row[3]]) for index, row in enumerate(expected)]
    chains = all(row[0] == place - 1 for row, place in zip(expected, places, strict=True))
    assert (rows.row_mask is None) == chains
    seen = torch.zeros(batch, rows.width, rows.width, dtype=torch.bool)
    for request, start in enumerate(rows.row_starts[:-1].tolist()):
        for row in range(counts[request] if not chains else rows.width):
            at = row
            while at >= 0:
                seen[request, row, at] = True
                at = at - 1 if chains else expected[start + at][0]
    assert torch.equal(rows.seen(), seen)
    assert_same_rows(rows, tree.take_rows(*plan))


@BODIES
@settings(max_examples=150, deadline=None)
@given(plan=plans(), dtype=st.sampled_from([torch.int32, torch.int64]), seed=st.integers(0, 99))
def test_rows_are_laid_out(body, plan, dtype, seed):
    """Fails where a row gets another candidate's id, its place for its depth as position, its depth for its place as
    slot, or the table, ids or prefixes of another request."""
    trees, drafted, lens, batch, *_ = plan
    rows, random = tree.take_rows(trees, drafted, lens, batch), torch.Generator().manual_seed(seed)
    shape = (len(drafted), int(trees.depths.max()) if drafted else 1, 4)
    candidate_ids = torch.randint(1000, shape, generator=random)
    bonus_ids = torch.randint(1000, (batch,), generator=random)
    table, requests, prefixes = make_tables(rows.lens, seed)
    arguments = (drafted, candidate_ids, bonus_ids, prefixes.to(dtype), requests.to(dtype), table)
    laid = body.lay_out_trees(rows, *arguments)
    ids, positions, slots = [], [], []
    for index, (depth, rank, request) in enumerate(zip(*(field.tolist() for field in rows[1:4]), strict=True)):
        proposed = None if rank < 0 else candidate_ids[drafted.index(request), depth - 1, rank]
        ids.append(int(bonus_ids[request] if proposed is None else proposed))
        positions.append(int(prefixes[request]) + depth)
        place = int(prefixes[request]) + index - int(rows.row_starts[request])
        slots.append(int(table[requests[request], place]))
    assert_equal(laid, tuple(torch.tensor(field) for field in (ids, positions, slots)))


@NATIVE
@pytest.mark.parametrize(
    ("drafted", "lens"),
    [([0], [1, 1]), ([1, 0], [1, 1]), ([0, 0], [1, 1]), ([0, 2], [1, 1]), ([0, 1], [0, 1]), ([0, 1], [1, 4])],
)
def test_wrong_plans_are_refused(drafted, lens):
    """Fails where rows beyond a tree, or the trees of other requests, are read."""
    trees = tree.best_first(make_chances(2, 2, 2, "any", 0), 3)
    with pytest.raises(RuntimeError, match=r"is needed|is of request"):
        KERNELS.plans.take_rows(trees, drafted, lens, 2)


@NATIVE
@pytest.mark.parametrize("parents", [[-1, 0, 2], [-1, 1, 0], [-1, 0, 3]])
def test_a_parent_behind_its_row_is_refused(parents):
    """Fails where the mask of a row is read before it is made."""
    fields = torch.tensor([[-1, 0, 0], parents]), torch.tensor([[0, 1, 1]] * 2), torch.tensor([[-1, 0, 1]] * 2)
    trees = Trees(*(field.int() for field in fields), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"row \d of request 1 has the parent"):
        KERNELS.plans.take_rows(trees, [0, 1], [3, 3], 2)


@NATIVE
def test_wrong_layouts_are_refused():
    """Fails where candidates that do not exist, or slots beyond a row of the table, are read."""
    trees = tree.best_first(torch.full((1, 2, 2), 0.5), 5)
    rows = tree.take_rows(trees, [0], [5], 1)
    good = [[0], torch.zeros(1, 2, 2, dtype=torch.int64), torch.tensor([7]), torch.tensor([1]), torch.tensor([0])]
    table = torch.zeros(1, 6, dtype=torch.int32)
    KERNELS.plans.lay_out_trees(rows, *good, table)
    for place, wrong, message in (
        (0, [], "candidate_ids are"),
        (0, [1], r"drafted\[0\] is 1"),
        (1, torch.zeros(1, 1, 2, dtype=torch.int64), "is candidate 0 of depth 2"),
        (1, torch.zeros(1, 2, 1, dtype=torch.int64), "is candidate 1 of depth"),
        (3, torch.tensor([2]), "a row of req_to_token has 6"),
        (3, torch.tensor([-1]), "a row of req_to_token has 6"),
        (4, torch.tensor([1]), "req_pool_indices"),
        (2, torch.tensor([7, 8]), "row_starts is"),
    ):
        with pytest.raises(RuntimeError, match=message):
            KERNELS.plans.lay_out_trees(rows, *good[:place], wrong, *good[place + 1 :], table)
    for field in ("depths", "ranks", "row_starts"):
        with pytest.raises(RuntimeError, match=field):
            KERNELS.plans.lay_out_trees(rows._replace(**{field: getattr(rows, field)[:-1].clone()}), *good, table)

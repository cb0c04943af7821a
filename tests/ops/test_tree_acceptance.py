"""Acceptance along trees and the exchange of slots behind it. Every body against another definition, and the native
ones against their specification."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import (
    BODIES,
    CHOSEN,
    DTYPES,
    KINDS,
    NATIVE,
    ROW_LENS,
    THREADS,
    assert_equal,
    chain_rows,
    make_logits,
    make_rows,
    make_tables,
    padded,
    threads,
)

from sglang_dflash import ops
from sglang_dflash.ops import TreeAcceptance, reference, tree

KERNELS = ops.choose_kernels("cpu", torch.float32)


@pytest.mark.parametrize("batch", [0, 1, 5])
def test_anchors_alone(batch):
    """Fails where requests without drafts commit anything but the target's one token, or of another type than trees."""
    target_ids = torch.arange(batch) * 7
    parents, starts = torch.full((batch,), -1, dtype=torch.int32), torch.arange(batch + 1)
    assert_equal(
        ops.accept_anchors(target_ids), tree.accept_tree(target_ids, torch.zeros_like(target_ids), parents, starts, 1)
    )


@BODIES
def test_every_path_of_every_tree(body):
    """Fails where, in any tree of up to five rows, the path to any row is not followed to its end and no further, or
    leaves another row's request. Each path is one request, between two of other shapes."""
    for rows in range(1, 6):
        for choice in product(*(range(row) for row in range(1, rows))):
            parents = [-1, *choice]
            for last in range(rows):
                path = [last]
                while parents[path[0]] >= 0:
                    path.insert(0, parents[path[0]])
                target = [90 + row for row in range(rows)]  # ids that no row has
                for row, behind in pairwise(path):
                    target[row] = 10 + behind
                accepted = body.accept_tree(
                    torch.tensor([11, 50, *target, 50]),
                    torch.tensor([10, 11, *range(10, 10 + rows), 10]),
                    torch.tensor([-1, 0, *parents, -1], dtype=torch.int32),
                    torch.tensor([0, 2, 2 + rows, 3 + rows]),
                    6,
                )
                out = [target[row] for row in path]
                assert accepted.commit_lens.tolist() == [2, len(path), 1]
                assert accepted.bonus_ids.tolist() == [50, out[-1], 50]
                rest = [0] * (6 - len(path))
                assert accepted.out_ids.tolist() == [[11, 50, 0, 0, 0, 0], out + rest, [50, 0, 0, 0, 0, 0]]
                assert accepted.path[1].tolist() == [2 + row for row in path] + [2] * len(rest)
                assert accepted.path[[0, 2]].tolist() == [[0, 1, 0, 0, 0, 0], [2 + rows] * 6]


@BODIES
def test_of_equal_siblings_the_first_is_taken(body):
    """Fails where the later of two children with the same id is taken, here the only one whose child would match."""
    ids = torch.tensor([1, 5, 5, 6])
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32)
    accepted = body.accept_tree(torch.tensor([5, 6, 6, 7]), ids, parents, torch.tensor([0, 4]), 4)
    assert accepted.path.tolist() == [[0, 1, 0, 0]]
    assert accepted.out_ids.tolist() == [[5, 6, 0, 0]]
    assert accepted.bonus_ids.tolist() == [6]


@BODIES
def test_a_matching_row_elsewhere_is_not_taken(body):
    """Fails where an id counts as accepted though its parent is rejected, or is the anchor's own."""
    parents = torch.tensor([-1, 0, 1, 0], dtype=torch.int32)
    accepted = body.accept_tree(
        torch.tensor([8, 8, 8, 8]), torch.tensor([8, 5, 8, 6]), parents, torch.tensor([0, 4]), 3
    )
    assert accepted.commit_lens.tolist() == [1]
    assert accepted.path.tolist() == [[0, 0, 0]]


def assert_chains_accept_alike(got: TreeAcceptance, expected: ops.GreedyAcceptance, batch: int, length: int) -> None:
    width = expected.out_ids.shape[1]
    assert torch.equal(got.out_ids[:, :width], expected.out_ids)
    assert not got.out_ids[:, width:].any()
    assert torch.equal(got.commit_lens, expected.commit_lens)
    assert torch.equal(got.bonus_ids, expected.bonus_ids)
    columns, anchors = torch.arange(length), torch.arange(batch)[:, None] * width
    assert torch.equal(got.path, anchors + torch.where(columns < expected.commit_lens[:, None], columns, 0))
    assert [field.dtype for field in got] == [torch.int64, torch.int32, torch.int64, torch.int64]


@BODIES
@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(0, 5),
    width=st.integers(1, 9),
    tokens=st.sampled_from([1, 2, 50]),
    more=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_chains_accept_as_chains(body, batch, width, tokens, more, seed):
    """Fails where a chain, given as a tree, commits anything else than `accept_chain` does."""
    random = torch.Generator().manual_seed(seed)
    target_ids, ids = (torch.randint(tokens, (batch, width), generator=random) for _ in range(2))
    agree = torch.rand(batch, width, generator=random) < 0.7
    ids[:, 1:] = torch.where(agree, target_ids, ids)[:, :-1]
    got = body.accept_tree(target_ids.flatten(), *chain_rows(ids), width + more)
    assert_chains_accept_alike(got, reference.accept_chain(target_ids, ids), batch, width + more)


@BODIES
@settings(max_examples=60, deadline=None)
@given(batch=st.integers(0, 5), width=st.integers(1, 7), kind=st.sampled_from(KINDS), dtype=DTYPES, data=st.data())
def test_chains_accept_greedily_as_chains(body, batch, width, kind, dtype, data):
    """Fails where ties, NaN or infinities give a chain's rows other ids than `accept_greedy` does."""
    vocabulary, seed = data.draw(st.sampled_from([1, 7, 300])), data.draw(st.integers(0, 99))
    logits = make_logits(kind, batch * width, vocabulary, seed).to(dtype)
    random = torch.Generator().manual_seed(seed)
    ids, best = torch.randint(vocabulary, (batch, width), generator=random), logits.argmax(-1).view(batch, width)
    agree = torch.rand(batch, width, generator=random) < 0.8
    ids[:, 1:] = torch.where(agree, best, ids)[:, :-1]
    expected = reference.accept_greedy(logits.view(batch, width, vocabulary), ids)
    assert_chains_accept_alike(body.accept_tree_greedy(logits, *chain_rows(ids), width), expected, batch, width)


@settings(max_examples=150, deadline=None)
@given(row_lens=ROW_LENS, tokens=st.integers(1, 4), seed=st.integers(0, 999))
def test_acceptance_equals_its_specification(row_lens, tokens, seed):
    """Fails where any bit differs, with few tokens, so that many rows match and many siblings are equal."""
    ids, parents, row_starts = make_rows(row_lens, tokens, seed)
    target_ids = torch.randint(tokens, ids.shape, generator=torch.Generator().manual_seed(seed + 1))
    got, expected = (body.accept_tree(target_ids, ids, parents, row_starts, 12) for body in (CHOSEN, tree))
    assert_equal(got, expected)


@settings(max_examples=150, deadline=None)
@given(row_lens=ROW_LENS, kind=st.sampled_from(KINDS), dtype=DTYPES, count=THREADS, data=st.data())
def test_greedy_acceptance_equals_its_specification(row_lens, kind, dtype, count, data):
    """Fails where any bit differs, with ties, NaN, parts of a larger vocabulary, and logits of more rows than the
    trees have."""
    vocabulary, seed = data.draw(st.sampled_from([1, 3, 1025, 20000])), data.draw(st.integers(0, 99))
    ids, parents, row_starts = make_rows(row_lens, vocabulary, seed)
    logits = make_logits(kind, len(ids) + data.draw(st.integers(0, 2)), vocabulary, seed).to(dtype)
    behind = [row for row, parent in enumerate(parents.tolist()) if parent >= 0 and data.draw(st.booleans())]
    starts = row_starts[torch.searchsorted(row_starts, torch.arange(len(ids)), right=True) - 1]
    ids[behind] = logits.argmax(-1)[(starts + parents)[behind]]  # such a row equals the target's choice
    if data.draw(st.booleans()):
        logits = padded(logits, 5)
    with threads(count):
        got = KERNELS.accept_tree_greedy(logits, ids, parents, row_starts, 12)
    assert_equal(got, tree.accept_tree_greedy(logits, ids, parents, row_starts, 12))


@BODIES
def test_the_longest_path_may_fill_the_result(body):
    """Fails where `length` must exceed the longest path."""
    rows = chain_rows(torch.tensor([[1, 2, 3]]))
    accepted = body.accept_tree(torch.tensor([2, 3, 4]), *rows, 3)
    assert accepted.out_ids.tolist() == [[2, 3, 4]]
    assert accepted.path.tolist() == [[0, 1, 2]]


@NATIVE
def test_a_path_that_does_not_fit_is_refused():
    """Fails where a path longer than the result is written past its end, or cut."""
    rows = chain_rows(torch.tensor([[1, 2, 3]]))
    for length in (0, 2):
        with pytest.raises(RuntimeError, match=f"a path is longer than {length}"):
            KERNELS.accept_tree(torch.tensor([2, 3, 4]), *rows, length)
    assert KERNELS.accept_tree(torch.tensor([2, 9, 4]), *rows, 2).commit_lens.tolist() == [2]


@NATIVE
@pytest.mark.parametrize(
    ("parents", "row_starts", "message"),
    [
        ([-1, 0, 2, -1, 0], [0, 3, 5], "row 2 of request 0 has the parent 2"),
        ([-1, 0, 1, -1, -1], [0, 3, 5], "row 1 of request 1 has the parent -1"),
        ([-1, 0, 1, 2, 0], [0, 3, 5], "row 0 of request 1 has the parent 2"),
        ([0, 0, 1, -1, 0], [0, 3, 5], "row 0 of request 0 has the parent 0"),
        ([-1, 0, 1, -1, -2], [0, 3, 5], "row 1 of request 1 has the parent -2"),
        ([-1, 0, 0, 0, 0], [0, 4], "row_starts must go from 0 to 5"),
        ([-1, 0, 0, 0, 0], [1, 5], "row_starts must go from 0 to 5"),
        ([-1, 0, 0, 0, 0], [], "row_starts must go from 0 to 5"),
        ([-1, 0, 0, 0, 0], [0, 0, 5], "request 0 has no rows"),
        ([-1, 0, 0, 0, 0], [0, 3, 2, 5], "request 1 has no rows"),
        ([-1, 0, 0, 0, 0], [0, 2**40, 5], "request 1 has no rows"),  # nothing is read so far away
        ([-1, 0, 0, 0], [0, 5], r"int32 of \[5\] is needed"),
    ],
)
def test_wrong_trees_are_refused(parents, row_starts, message):
    """Fails where a row's parent is behind it or in another request, where rows belong to no request, or where memory
    beyond the rows is read."""
    ids = torch.zeros(5, dtype=torch.int64)
    rows = (ids, torch.tensor(parents, dtype=torch.int32), torch.tensor(row_starts, dtype=torch.int64), 5)
    for call, target in ((KERNELS.accept_tree, ids), (KERNELS.accept_tree_greedy, torch.zeros(5, 3))):
        with pytest.raises(RuntimeError, match=message):
            call(target, *rows)


@NATIVE
def test_wrong_targets_are_refused():
    """Fails where the target's tokens of too few rows, or of another dtype, are read."""
    rows = (*chain_rows(torch.zeros(1, 5, dtype=torch.int64)), 5)
    with pytest.raises(RuntimeError, match="target_ids is"):
        KERNELS.accept_tree(torch.zeros(4, dtype=torch.int64), *rows)
    with pytest.raises(RuntimeError, match="target_ids is"):
        KERNELS.accept_tree(torch.zeros(5, dtype=torch.int32), *rows)
    for logits in (torch.zeros(4, 3), torch.zeros(5, 0), torch.zeros(3, 5).T, torch.zeros(15)):
        with pytest.raises(RuntimeError, match="V\\] with dense rows is needed"):
            KERNELS.accept_tree_greedy(logits, *rows)


@BODIES
@settings(max_examples=80, deadline=None)
@given(row_lens=ROW_LENS, tokens=st.integers(1, 3), seed=st.integers(0, 999))
def test_slots_are_exchanged(body, row_lens, tokens, seed):
    """Fails where a committed row's slot is not at its position, a slot is lost or stands twice, rejected rows change
    their order, or anything else in the table changes."""
    ids, parents, row_starts = make_rows(row_lens, tokens, seed)
    target_ids = torch.randint(tokens, ids.shape, generator=torch.Generator().manual_seed(seed + 1))
    accepted = tree.accept_tree(target_ids, ids, parents, row_starts, 12)
    table, requests, prefixes = make_tables(row_lens, seed)
    storage = table.as_strided((len(table), table.stride(0)), table.stride())  # with the columns behind the table
    before, expected = storage.clone(), storage.clone()
    body.exchange_slots(table, requests, prefixes, accepted.path, accepted.commit_lens, row_starts)
    for b, rows in enumerate(row_lens):
        path = (accepted.path[b, : accepted.commit_lens[b]] - row_starts[b]).tolist()
        span = slice(int(prefixes[b]), int(prefixes[b]) + rows)
        own, old = table[requests[b], span].tolist(), before[requests[b], span].tolist()
        assert own[: len(path)] == [old[row] for row in path]
        assert own[len(path) :] == [slot for row, slot in enumerate(old) if row not in path]
        expected[requests[b], span] = torch.tensor(own, dtype=torch.int32)
    assert torch.equal(storage, expected)


@NATIVE
@pytest.mark.parametrize(
    ("path", "count", "prefix", "row", "message"),
    [
        ([0, 4, 0, 0], 2, 0, 0, "row 1 of the path of request 0 is 4"),
        ([0, 2, 1, 0], 3, 0, 0, "row 2 of the path of request 0 is 1"),
        ([0, 2, 2, 0], 3, 0, 0, "row 2 of the path of request 0 is 2"),
        ([-1, 2, 0, 0], 2, 0, 0, "row 0 of the path of request 0 is -1"),
        ([0, 1, 2, 3], 5, 0, 0, "request 0 commits 5 of 4 rows"),
        ([0, 1, 2, 3], 0, 0, 0, "request 0 commits 0 of 4 rows"),
        ([0, 1, 2, 3], -1, 0, 0, "request 0 commits -1 of 4 rows"),
        ([0, 1, 2, 3], 4, 3, 0, "request 0 commits 4 of 4 rows behind 3 tokens"),
        ([0, 1, 2, 3], 4, -1, 0, "request 0 commits 4 of 4 rows behind -1 tokens"),
        ([0, 1, 2, 3], 4, 0, 2, "req_pool_indices"),
    ],
)
def test_exchanges_are_refused(path, count, prefix, row, message):
    """Fails where a slot would be lost, or memory beyond a row of the table would be written."""
    arguments = (torch.tensor([row]), torch.tensor([prefix]), torch.tensor([path]))
    with pytest.raises(RuntimeError, match=message):
        KERNELS.plans.exchange_slots(
            torch.zeros(2, 6, dtype=torch.int32),
            *arguments,
            torch.tensor([count], dtype=torch.int32),
            torch.tensor([0, 4]),
        )


@NATIVE
def test_paths_without_requests_are_refused():
    """Fails where the shape of the paths is used before it is checked."""
    arguments = torch.zeros(1, 6, dtype=torch.int32), torch.tensor([0]), torch.tensor([0]), torch.tensor([0])
    with pytest.raises(RuntimeError, match="path is"):
        KERNELS.plans.exchange_slots(*arguments, torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="path is"):
        KERNELS.plans.committed_rows(*arguments, torch.tensor([1], dtype=torch.int32), torch.zeros(1, 3))


@BODIES
@settings(max_examples=60, deadline=None)
@given(row_lens=st.lists(st.integers(1, 9), min_size=1, max_size=5), tokens=st.integers(1, 4), seed=st.integers(0, 999))
def test_committed_rows(body, row_lens, tokens, seed):
    """Fails where a row that is not committed is listed, one is missing, or a position, slot or state is another
    row's."""
    ids, parents, row_starts = make_rows(row_lens, tokens, seed)
    target_ids = torch.randint(tokens, ids.shape, generator=torch.Generator().manual_seed(seed + 1))
    accepted = tree.accept_tree(target_ids, ids, parents, row_starts, 12)
    table, requests, prefixes = make_tables(row_lens, seed)
    padded = torch.rand(len(ids) + tokens - 1, 7, generator=torch.Generator().manual_seed(seed))
    hidden = padded.to(torch.bfloat16 if seed % 2 else torch.float32)[:, : 3 + seed % 5]
    *fields, states = body.committed_rows(table, requests, prefixes, accepted.path, accepted.commit_lens, hidden)
    expected = [
        (int(accepted.path[b, place]), int(prefixes[b]) + place, int(table[requests[b], int(prefixes[b]) + place]))
        for b, count in enumerate(accepted.commit_lens.tolist())
        for place in range(count)
    ]
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == expected
    assert all(field.dtype == torch.int64 for field in fields)
    assert states.dtype == hidden.dtype and torch.equal(states, hidden[fields[0]])


@NATIVE
@pytest.mark.parametrize(("count", "prefix", "row"), [(5, 0, 0), (0, 0, 0), (4, 3, 0), (1, -1, 0), (1, 0, 2)])
def test_rows_outside_the_table_are_refused(count, prefix, row):
    """Fails where memory beside a row of the table or the path would be read."""
    arguments = (torch.tensor([row]), torch.tensor([prefix]), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"commits|req_pool_indices"):
        KERNELS.plans.committed_rows(
            *(torch.zeros(2, 6, dtype=torch.int32), *arguments, torch.tensor([count], dtype=torch.int32)),
            torch.zeros(4, 3),
        )


@NATIVE
@pytest.mark.parametrize("hidden", [torch.zeros(1, 3), torch.zeros(4), torch.zeros(3, 4).T])
def test_states_outside_of_the_path_are_refused(hidden):
    """Fails where memory beside the hidden states would be read."""
    table, requests = torch.zeros(1, 6, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    paths = torch.tensor([[0, 2]]), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"path\[1\] is 2|hidden is"):
        KERNELS.plans.committed_rows(table, requests, requests, *paths, hidden)

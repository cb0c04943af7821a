"""The search for trees: candidates, their chances, best-first search, ancestors. Every body against another definition,
and the native ones against their specification."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import (
    BODIES,
    DTYPES,
    KINDS,
    NATIVE,
    THREADS,
    assert_equal,
    make_chances,
    make_logits,
    make_rows,
    padded,
    random_parents,
    threads,
)

from sglang_dflash import ops
from sglang_dflash.ops import tree

KERNELS = ops.choose_kernels("cpu", torch.float32)

EPS = torch.finfo(torch.float32).eps


def assert_near(got: ops.Proposal, logits: torch.Tensor, count: int) -> None:
    """Ids as in the specification; log-probabilities within twice its error against float64, plus some roundings."""
    expected = tree.top_log_probs(logits, count)
    assert got.ids.dtype == torch.int64 and got.log_probs.dtype == torch.float32
    assert torch.equal(got.ids, expected.ids)
    assert torch.equal(got.log_probs.isneginf(), expected.log_probs.isneginf())
    finite = ~expected.log_probs.isneginf()
    if not finite.any():
        return
    wide = torch.where(logits.isnan(), -torch.inf, logits.double())
    truth = wide.log_softmax(-1).gather(1, expected.ids)[finite]
    largest = wide.gather(1, expected.ids)[finite].abs().max() + truth.abs().max() + 2
    allowed = 2 * (expected.log_probs[finite] - truth).abs().max() + EPS * largest
    error = (got.log_probs[finite] - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"  # false for NaN


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_best_candidates(data):
    """Fails where a candidate is missed or in a wrong place, a tie goes to a higher id, NaN counts as more than -inf, a
    part of the vocabulary or its end is left out of the softmax, or padding behind it is read."""
    vocabulary = data.draw(st.sampled_from([1, 2, 7, 33, 64, 300, 1025, 16384, 16385, 40000]))
    count = data.draw(st.sampled_from([1, 2, 8, 65, vocabulary]).filter(lambda count: count <= min(vocabulary, 1025)))
    kind, rows = data.draw(st.sampled_from(KINDS)), data.draw(st.integers(0, 6))
    logits = make_logits(kind, rows, vocabulary, data.draw(st.integers(0, 99))).to(data.draw(DTYPES))
    if data.draw(st.booleans()):
        logits = padded(logits, data.draw(st.integers(1, 20)))
    with threads(data.draw(THREADS)):
        assert_near(KERNELS.top_log_probs(logits, count), logits, count)


@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4, 1e30])
def test_large_and_small_logits(scale):
    """Fails where an exponential overflows, or a sum of one part of the vocabulary is not scaled to another's maximum.
    The maxima rise from part to part, or fall."""
    rising = torch.linspace(-1, 1, 40000)[None] * scale
    for logits in (rising, rising.flip(1), rising.roll(20000, 1)):
        assert_near(KERNELS.top_log_probs(logits, 8), logits, 8)


@BODIES
def test_candidates_by_hand(body):
    """Fails where candidates without a finite logit, which come last, are not the lowest ids, or where a row without a
    finite maximum gives a NaN."""
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[1.0, 3.0, nan, 3.0, -inf], [-inf] * 5, [nan] * 5, [1.0, inf, 2.0, nan, inf]])
    ids, log_probs = body.top_log_probs(logits, 5)
    assert ids.tolist() == [[1, 3, 0, 2, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 4, 2, 0, 3]]
    chances = log_probs[0].double().exp()
    e2 = torch.tensor(2.0, dtype=torch.float64).exp()
    assert torch.allclose(chances, torch.stack((e2, e2, e2**0, 0 * e2, 0 * e2)) / (2 * e2 + 1), atol=1e-6)
    assert log_probs[1:].isneginf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_other_rows_change_no_bit(dtype):
    """Fails where the split of the work changes a sum: a draft alone would be planned otherwise than in a batch."""
    logits = make_logits("normal", 9, 40000, 0).to(dtype)
    with threads(4):
        together = KERNELS.top_log_probs(logits, 8)
        alone = [KERNELS.top_log_probs(logits[row : row + 1], 8) for row in range(9)]
    assert_equal(together, tuple(torch.cat(field) for field in zip(*alone, strict=True)))
    assert_equal(together, KERNELS.top_log_probs(logits, 8))


def test_other_dtypes_have_the_torch_body():
    """Fails where logits that the native op refuses are not left to the specification."""
    logits = make_logits("ties", 3, 50, 0)
    for dtype in (torch.float16, torch.float64):
        kernels = ops.choose_kernels("cpu", dtype)
        assert_equal(kernels.top_log_probs(logits.to(dtype), 4), tree.top_log_probs(logits.to(dtype), 4))
        rows = make_rows([2, 1], 50, 0)
        got, expected = (body.accept_tree_greedy(logits.to(dtype), *rows, 2) for body in (kernels, tree))
        assert_equal(got, expected)


@NATIVE
@pytest.mark.parametrize(("shape", "count"), [((2, 5), 0), ((2, 5), 6), ((5,), 1), ((2, 5, 2), 1)])
def test_candidates_are_refused(shape, count):
    """Fails where more candidates are asked for than there are, or logits of another shape are read."""
    with pytest.raises(RuntimeError, match=r"\[N, V\] with dense rows and a count of 1 .. V"):
        KERNELS.top_log_probs(torch.zeros(shape), count)
    with pytest.raises(RuntimeError, match="dense rows"):
        KERNELS.top_log_probs(torch.zeros(5, 2).T, 1)


CHANCES = st.tuples(
    st.integers(0, 4), st.integers(0, 6), st.integers(0, 4), st.sampled_from(["any", "ties", "certain", "tiny"])
)


@settings(max_examples=200, deadline=None)
@given(shape=CHANCES, rows=st.integers(1, 40), seed=st.integers(0, 99))
def test_best_first_equals_its_specification(shape, rows, seed):
    """Fails where any bit differs: the order of equal reaches, a rank, a depth, or a row beyond the tree."""
    chances = make_chances(*shape, seed)
    assert_equal(KERNELS.plans.best_first(chances, rows), tree.best_first(chances, rows))


def path_of(trees: ops.Trees, request: int, row: int) -> tuple[int, ...]:
    """The ranks from the anchor to the row."""
    ranks: tuple[int, ...] = ()
    while trees.parents[request, row] >= 0:
        ranks = (int(trees.ranks[request, row]), *ranks)
        assert trees.depths[request, row] == trees.depths[request, trees.parents[request, row]] + 1
        row = int(trees.parents[request, row])
    assert row == 0
    return ranks


def all_reaches(chances: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The reach of every path ([D, k] chances), as the float32 product along it; those that can be reached only."""
    found = {}
    for depth in range(1, chances.shape[0] + 1):
        for ranks in product(range(chances.shape[1]), repeat=depth):
            reach = torch.tensor(1.0)
            for at, rank in enumerate(ranks):
                reach = reach * chances[at, rank]
            if reach > 0:
                found[ranks] = float(reach)
    return found


@BODIES
@settings(max_examples=60, deadline=None)
@given(
    depths=st.integers(0, 4),
    ranks=st.integers(1, 3),
    kind=st.sampled_from(["any", "ties", "certain", "tiny"]),
    rows=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_best_first_takes_the_most_likely_paths(body, depths, ranks, kind, rows, seed):
    """Fails where a path is taken twice, a likelier one is left out, a parent comes behind its child, reaches rise, or
    a row that no draft can reach is part of a tree."""
    chances = make_chances(2, depths, ranks, kind, seed)
    trees = body.best_first(chances, rows)
    for request in range(2):
        every = all_reaches(chances[request])
        count = min(rows, 1 + len(every))
        reaches = trees.reaches[request].tolist()
        paths = [path_of(trees, request, row) for row in range(count)]
        assert len(set(paths)) == count
        assert all(trees.parents[request, row] < row for row in range(rows))
        assert reaches[:count] == [1.0] + [every[path] for path in paths[1:]]
        assert reaches[1:count] == sorted(every.values(), reverse=True)[: count - 1]
        for field, fill in zip(trees, (-1, 0, -1, 0.0), strict=True):
            assert (field[request, count:] == fill).all()


@BODIES
def test_a_tree_by_hand(body):
    """Fails where equal reaches do not come in the order in which they are found, or another request's chances
    count."""
    chances = torch.tensor([[[0.5, 0.25], [0.5, 0.5]], [[1.0, 0.0], [0.0, 0.0]]])
    parents, depths, ranks, reaches = body.best_first(chances, 6)
    # Of the first request: depth 1; its second candidate (0.25); a child of the first (0.25); its sibling (0.25); ...
    assert parents.tolist() == [[-1, 0, 0, 1, 1, 2], [-1, 0, -1, -1, -1, -1]]
    assert depths.tolist() == [[0, 1, 1, 2, 2, 2], [0, 1, 0, 0, 0, 0]]
    assert ranks.tolist() == [[-1, 0, 1, 0, 1, 0], [-1, 0, -1, -1, -1, -1]]
    assert reaches.tolist() == [[1.0, 0.5, 0.25, 0.25, 0.25, 0.125], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]]


@BODIES
def test_one_candidate_for_each_row_gives_a_chain(body):
    """Fails where a draft without alternatives gives another tree than a chain."""
    parents, depths, ranks, reaches = body.best_first(torch.tensor([[[0.5]] * 5]), 4)
    assert parents.tolist() == [[-1, 0, 1, 2]]
    assert depths.tolist() == [[0, 1, 2, 3]]
    assert ranks.tolist() == [[-1, 0, 0, 0]]
    assert reaches.tolist() == [[1.0, 0.5, 0.25, 0.125]]


@NATIVE
def test_chances_are_refused():
    """Fails where chances of another dtype or layout are read, or a tree without an anchor is asked for."""
    for chances, rows in (
        (torch.zeros(1, 2, 2).double(), 3),
        (torch.zeros(2, 2), 3),
        (torch.zeros(1, 2, 3).transpose(1, 2), 3),
        (torch.zeros(1, 2, 2), 0),
    ):
        with pytest.raises(RuntimeError, match=r"dense float32 of \[B, D, k\] and at least one row are needed"):
            KERNELS.plans.best_first(chances, rows)


@settings(max_examples=80, deadline=None)
@given(batch=st.integers(0, 4), rows=st.integers(1, 20), data=st.data())
def test_ancestors(batch, rows, data):
    """Fails where a row does not see an ancestor or itself, or sees any other row. By another definition: row j is on
    the way from row i to the anchor if one of the powers of the matrix of parents says so."""
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    width = data.draw(st.integers(0, rows))
    parents = torch.tensor([random_parents(rows, random) for _ in range(batch)], dtype=torch.int32).view(batch, rows)
    if data.draw(st.booleans()):
        parents[torch.rand(parents.shape, generator=random) < 0.2] = -1  # rows that are no part of the tree
    step = (parents[:, :, None] == torch.arange(rows)).float()
    seen = power = torch.eye(rows).expand(batch, -1, -1)
    for _ in range(rows):
        power = power @ step
        seen = seen + power
    masks = tree.ancestors(parents, width)
    assert masks.dtype == torch.bool
    assert torch.equal(masks, seen[:, :width, :width] > 0)

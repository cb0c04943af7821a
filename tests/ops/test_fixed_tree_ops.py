"""Trees of equally many rows: every torch body against the specification of trees, on random inputs."""

from __future__ import annotations

import pytest
import torch
from tree_cases import assert_equal, make_chances, make_logits, random_parents

from sglang_dflash.ops import fixed_trees, tree

SEEDS = range(12)
SHAPES = [(1, 1, 8, 9), (2, 1, 3, 4), (3, 2, 3, 13), (2, 7, 8, 16), (4, 7, 1, 8), (2, 15, 8, 64), (3, 5, 4, 2)]
"""Batch, depths, candidates and rows of trees."""


def parents_of(batch: int, rows: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.tensor([random_parents(rows, random) for _ in range(batch)], dtype=torch.int32).view(batch, rows)


def ids_of(parents: torch.Tensor, seed: int) -> torch.Tensor:
    """[B, N] int64, small, so that many equal the target's; children of one row differ."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, parents.shape, generator=random)
    for own, above in zip(ids, parents.tolist(), strict=True):
        for row, parent in enumerate(above):
            while any(above[other] == parent and own[other] == own[row] for other in range(row)):
                own[row] += 1
    return ids


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_likeliest_rows(shape, seed):
    """Fails where a tree lacks a row that is likelier than one of its own, or a row hangs at another parent."""
    batch, depths, count, rows = shape
    assert rows <= fixed_trees.most_rows(depths, count, rows)
    chances = make_chances(batch, depths, count, "plain", seed)
    assert_equal(fixed_trees.grow_trees(chances, rows), tree.best_first(chances, rows))


@pytest.mark.parametrize("kind", ["ties", "certain", "tiny"])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_with_equal_chances(kind, seed):
    """Fails where ties, or candidates without a chance, give other reaches, a parent behind its child, or one candidate
    twice."""
    chances = make_chances(3, 5, 4, kind, seed)
    trees, expected = fixed_trees.grow_trees(chances, 12), tree.best_first(chances, 12)
    assert torch.equal(trees.reaches, expected.reaches)
    assert (trees.parents[:, 1:] < torch.arange(1, 12)).all() and (trees.parents[:, 1:] >= 0).all()
    for parents, depths, ranks, reaches, own in zip(*trees, chances, strict=True):
        assert len({*zip(parents.tolist(), ranks.tolist(), strict=True)}) == 12
        for row in range(1, 12):
            assert depths[row] == depths[parents[row]] + 1
            assert reaches[row] == reaches[parents[row]] * own[depths[row] - 1, ranks[row]]


@pytest.mark.parametrize(
    ("depths", "count", "most", "rows"), [(1, 8, 64, 9), (2, 8, 64, 64), (7, 1, 64, 8), (3, 2, 9, 9)]
)
def test_how_many_rows_every_tree_can_have(depths, count, most, rows):
    assert fixed_trees.most_rows(depths, count, most) == rows
    assert fixed_trees.grow_trees(make_chances(2, depths, count, "plain", 0), rows).parents.shape == (2, rows)


@pytest.mark.parametrize("kind", ["normal", "nan", "infinite", "minus-infinite"])
@pytest.mark.parametrize("count", [1, 5])
def test_candidates(kind, count):
    """Fails where other ids than the best, another order or other log-probabilities are taken."""
    logits = make_logits(kind, 9, 40, 3)
    ours, expected = fixed_trees.top_log_probs(logits, count), tree.top_log_probs(logits, count)
    torch.testing.assert_close(ours.log_probs, expected.log_probs)
    finite = expected.log_probs.isfinite()
    assert torch.equal(ours.ids[finite], expected.ids[finite])


def test_equal_candidates_stand_by_id():
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 3.0, 2.0]])
    assert fixed_trees.top_log_probs(logits, 4).ids.tolist() == [[1, 3, 4, 5]]


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_ancestors(rows, seed):
    parents = parents_of(3, rows, seed)
    assert torch.equal(fixed_trees.ancestors(parents, rows), tree.ancestors(parents, rows))


@pytest.mark.parametrize("batch", [0, 1, 4])
@pytest.mark.parametrize("rows", [2, 7, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_acceptance(batch, rows, seed):
    """Fails where a path ends too early or too late, or anything behind it is not as specified."""
    parents = parents_of(batch, rows, seed)
    ids = ids_of(parents, seed)
    target_ids = torch.randint(3, (batch * rows,), generator=torch.Generator().manual_seed(seed + 99))
    arguments = target_ids, ids.flatten(), parents.flatten(), torch.arange(batch + 1) * rows, rows
    accepted, expected = fixed_trees.accept_tree(*arguments), tree.accept_tree(*arguments)
    assert_equal(accepted, expected)


def test_acceptance_meets_long_paths():
    """Fails where the test above sees no path of many rows."""
    rows = 16
    parents = torch.arange(-1, rows - 1, dtype=torch.int32).repeat(rows + 1, 1)
    ids = torch.arange(rows).repeat(rows + 1, 1)
    target_ids = ids + 1
    for wrong in range(rows):
        target_ids[wrong, wrong] = 99
    accepted = fixed_trees.accept_tree(
        target_ids.flatten(), ids.flatten(), parents.flatten(), torch.arange(rows + 2) * rows, rows
    )
    assert accepted.commit_lens.tolist() == [*range(1, rows + 1), rows]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rows_of_drafted_trees(seed):
    """Fails where ids, positions or slots are not those of the specification's layout."""
    batch, depths, count, rows = 3, 4, 3, 9
    random = torch.Generator().manual_seed(seed)
    log_probs = make_chances(batch, depths, count, "plain", seed).log()
    proposal = tree.Proposal(torch.randint(100, log_probs.shape, generator=random), log_probs)
    bonus_ids, prefix_lens = torch.tensor([7, 8, 9]), torch.tensor([0, 5, 3])
    table = torch.randperm(4 * 20, generator=random).view(4, 20).int()
    requests = torch.tensor([2, 0, 3])
    drafted = fixed_trees.draft_trees(proposal, bonus_ids, rows)
    positions, slots = fixed_trees.lay_out(drafted.depths, prefix_lens, requests, table)
    best = tree.best_first(log_probs.exp(), rows)
    taken = tree.take_rows(best, [0, 1, 2], [rows] * batch, batch)
    expected = tree.lay_out_trees(taken, [0, 1, 2], proposal.ids, bonus_ids, prefix_lens, requests, table)
    assert_equal((drafted.ids.flatten(), positions, slots), expected)
    assert torch.equal(drafted.seen, taken.seen())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_attention_mask(seed):
    """Fails where a row sees another key than its prefix and its ancestors, read as SGLang's kernels read it."""
    rows, prefix_lens = 6, torch.tensor([4, 0, 11])
    seen = tree.ancestors(parents_of(3, rows, seed), rows)
    cells = int((rows * (prefix_lens + rows)).sum())
    mask = fixed_trees.attention_mask(seen, prefix_lens, cells + 10)
    assert mask[cells:].all()
    start = 0
    for own, prefix in zip(seen, prefix_lens.tolist(), strict=True):
        keys = prefix + rows
        view = mask[start : start + rows * keys].view(rows, keys)
        assert view[:, :prefix].all() and torch.equal(view[:, prefix:], own)
        start += rows * keys


@pytest.mark.parametrize("seed", SEEDS)
def test_where_accepted_rows_belong(seed):
    """Fails where the places of a path get other slots than `committed_rows` gives, or others are moved."""
    rows, prefix_lens, requests = 8, torch.tensor([4, 0, 7]), torch.tensor([1, 2, 0])
    random = torch.Generator().manual_seed(seed)
    table = torch.randperm(3 * 20, generator=random).view(3, 20).int()
    parents = parents_of(3, rows, seed)
    ids = ids_of(parents, seed)
    target_ids = torch.randint(3, (3 * rows,), generator=random)
    accepted = tree.accept_tree(target_ids, ids.flatten(), parents.flatten(), torch.arange(4) * rows, rows)
    slots = fixed_trees.lay_out(torch.zeros_like(parents), prefix_lens, requests, table)[1]
    final = fixed_trees.final_slots(slots, accepted.path, accepted.commit_lens, prefix_lens)
    committed = (torch.arange(rows) < accepted.commit_lens[:, None]).flatten()
    paths = accepted.path, accepted.commit_lens
    path, positions, own, _ = tree.committed_rows(table, requests, prefix_lens, *paths, torch.zeros(len(slots), 1))
    assert_equal((final.positions[committed], final.slots[committed]), (positions, own))
    assert torch.equal(final.sources[committed], slots[path])
    assert torch.equal(final.sources[~committed], final.slots[~committed])


def test_links():
    """The host's form of the tree 0 - (1 - (3, 5), 2 - 4)."""
    children, siblings = fixed_trees.links(torch.tensor([[-1, 0, 0, 1, 2, 1]], dtype=torch.int32))
    assert children.tolist() == [[1, 3, 4, -1, -1, -1]]
    assert siblings.tolist() == [[-1, 2, -1, 5, -1, -1]]

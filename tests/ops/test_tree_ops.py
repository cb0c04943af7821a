"""Trees against brute force over small vocabularies."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sglang_cpu.ops import rows_as_requests
from sglang_dflash.ops import (
    Drafts,
    accept_tree,
    attention_mask,
    grow_trees,
    most_rows,
    seen_rows,
    top_drafts,
)


def drafted(batch: int, depths: int, count: int, seed: int = 0) -> Drafts:
    """Different candidates of each depth, the likelier first."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, depths, 20, generator=generator)
    best = logits.log_softmax(-1).topk(count)
    return Drafts(best.indices, best.values)


def paths_of(trees, request: int) -> list[tuple[int, ...]]:
    """The ids from the anchor to each row."""
    paths: list[tuple[int, ...]] = [()]
    parents, ids = trees.parents[request].tolist(), trees.ids[request].tolist()
    for row in range(1, len(parents)):
        assert parents[row] < row, "a parent stands before its child"
        paths.append((*paths[parents[row]], ids[row]))
    return paths


@pytest.mark.parametrize("rows", [2, 3, 9, 24])
def test_a_tree_holds_the_likeliest_paths(rows):
    """Fails where a path in the tree is less likely than one that is not, or is there twice."""
    drafts = drafted(batch=3, depths=3, count=3)
    trees = grow_trees(drafts, rows)
    for request in range(3):
        chances = {}
        for depth in (1, 2, 3):
            for ranks in product(range(3), repeat=depth):
                places = list(enumerate(ranks))
                path = tuple(int(drafts.ids[request, d, rank]) for d, rank in places)
                chances[path] = sum(float(drafts.log_probs[request, d, rank]) for d, rank in places)
        best = sorted(chances, key=chances.__getitem__, reverse=True)[: rows - 1]
        paths = paths_of(trees, request)
        assert sorted(paths[1:]) == sorted(best)
        assert [len(path) for path in paths] == trees.depths[request].tolist()


def test_drafts_that_are_certain():
    """Fails where equal chances part a child from its parent, or rows without a chance leave a tree short."""
    log_probs = torch.full((1, 4, 2), float("-inf"))
    log_probs[:, :, 0] = 0.0
    trees = grow_trees(Drafts(torch.arange(8).view(1, 4, 2), log_probs), 12)
    paths = paths_of(trees, 0)
    assert (0, 2, 4, 6) in paths[:5] and len(set(paths)) == 12
    assert most_rows(4, 2) == 31


@pytest.mark.parametrize("rows", [2, 7, 30])
def test_what_rows_see(rows):
    """Fails where a row sees another branch, or not all of its own."""
    trees = grow_trees(drafted(batch=2, depths=7, count=4), rows)
    seen = seen_rows(trees.parents, 8)
    for request in range(2):
        for row in range(rows):
            path = {row}
            while row:
                row = int(trees.parents[request, row])
                path.add(row)
            assert set(seen[request, max(path)].nonzero()[:, 0].tolist()) == path


@pytest.mark.parametrize("seed", range(20))
def test_the_accepted_path(seed):
    """Fails where another path than the one of the target's tokens is accepted, or a token behind it."""
    drafts = drafted(batch=4, depths=4, count=2, seed=seed)
    trees = grow_trees(drafts, 16)
    generator = torch.Generator().manual_seed(seed)
    target_ids = torch.randint(20, (4, 16), generator=generator)
    for request in range(4):  # the target follows some path for a while
        end = int(torch.randint(16, (1,), generator=generator))
        while end:
            parent = int(trees.parents[request, end])
            target_ids[request, parent] = trees.ids[request, end]
            end = parent
    out_ids, commit_lens, bonus_ids, path = accept_tree(target_ids, trees.ids, trees.parents, trees.depths, 5)
    for request in range(4):
        row, rows = 0, [0]
        while True:
            token = target_ids[request, row]
            children = (trees.parents[request] == row) & (trees.ids[request] == token)
            children[0] = False
            if not children.any():
                break
            row = int(children.nonzero()[0, 0])
            rows.append(row)
        count = len(rows)
        assert commit_lens[request] == count
        assert path[request].tolist() == rows + list(range(count, 16))
        assert out_ids[request].tolist() == target_ids[request, rows].tolist() + [0] * (16 - count)
        assert bonus_ids[request] == target_ids[request, rows[-1]]


def test_the_best_drafts():
    """Fails where NaN passes for a candidate, or log-probabilities are not those of the whole row."""
    logits = torch.tensor([[1.0, float("nan"), 3.0, 2.0]])
    ids, log_probs = top_drafts(logits, 2)
    assert ids.tolist() == [[2, 3]]
    right = torch.tensor([1.0, float("-inf"), 3.0, 2.0]).log_softmax(0)
    assert torch.allclose(log_probs, right[[2, 3]][None])


def test_the_mask_as_sglang_reads_it():
    """Fails where a row's cells are another row's, or those of another request."""
    seen = seen_rows(grow_trees(drafted(batch=2, depths=3, count=2), 6).parents, 4)
    prefix_lens = [5, 3]
    mask = attention_mask(seen, torch.tensor(prefix_lens), 200)
    first = 0
    for request, prefix in enumerate(prefix_lens):
        own = mask[first : first + 6 * (prefix + 6)].view(6, prefix + 6)
        assert own[:, :prefix].all()
        assert torch.equal(own[:, prefix:], seen[request])
        first += own.numel()


def test_rows_as_requests():
    """Fails where a row's slots are not those of the prefix and its path, its own last."""
    trees = grow_trees(drafted(batch=2, depths=3, count=2), 6)
    seen = seen_rows(trees.parents, 4)
    req_to_token = torch.arange(60).view(3, 20).int() * 7
    prefix_lens, requests = torch.tensor([5, 3]), torch.tensor([2, 0])
    table, rows, before = rows_as_requests(req_to_token, requests, prefix_lens, seen)
    for request, prefix in enumerate(prefix_lens.tolist()):
        slots = req_to_token[requests[request]]
        for row in range(6):
            path = seen[request, row].nonzero()[:, 0]
            expected = [*slots[:prefix].tolist(), *slots[prefix + path].tolist()]
            place = request * 6 + row
            assert before[place] == len(expected) - 1
            assert table[rows[place], : len(expected)].tolist() == expected

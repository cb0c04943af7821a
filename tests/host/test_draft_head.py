"""The draft's head under tensor parallelism: every rank ends with the argmax of the whole vocabulary."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from stand_ins import Group

from sglang_dflash.host import draft_heads
from sglang_dflash.host.draft_heads import DraftHead

BLOCK_SIZE = 4


def head_of(weight: torch.Tensor, first: int, padding: int, group: Group) -> DraftHead:
    padded = torch.cat((weight, torch.full((padding, weight.shape[1]), 1e4, dtype=weight.dtype)))
    shard = SimpleNamespace(num_added_elements=0, num_org_elements=len(weight), org_vocab_start_index=first)
    return DraftHead(SimpleNamespace(weight=padded, shard_indices=shard), BLOCK_SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "ranks"), [(1, 2), (3, 2), (2, 4)])
def test_every_rank_drafts_the_same(batch: int, ranks: int, dtype: torch.dtype, monkeypatch) -> None:
    """Fails where a rank's span has a wrong offset, its padding wins, or a tie goes to a higher id."""
    group = Group(ranks)
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    generator = torch.Generator().manual_seed(batch + ranks)
    # The same three rows repeat, so every logit ties with others, within a rank's span and across spans.
    weight = torch.randint(-1, 2, (3, 8), generator=generator).repeat(ranks * 2, 1)[: ranks * 5 - 2].to(dtype)
    hidden = torch.randint(-1, 2, (batch * BLOCK_SIZE, 8), generator=generator).to(dtype)
    heads = [
        head_of(weight[first : first + 5], first, 5 - len(weight[first : first + 5]), group)
        for first in range(0, ranks * 5, 5)
    ]

    def run(rank: int) -> torch.Tensor:
        group.local.rank = rank
        return heads[rank].draft_ids(hidden, torch.zeros(batch, BLOCK_SIZE, dtype=torch.int64))

    with ThreadPoolExecutor(ranks) as pool:
        drafted = list(pool.map(run, range(ranks)))
    logits = (hidden.float() @ weight.float().T).view(batch, BLOCK_SIZE, -1)[:, 1:]
    expected = logits.argmax(-1)
    for ids in drafted:
        assert ids.dtype == torch.int64 and torch.equal(ids, expected)


def test_new_weights_are_drafted_with(monkeypatch) -> None:
    """Fails where the head still uses a weight that the host has replaced."""
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))
    lm_head = SimpleNamespace(weight=torch.eye(4), shard_indices=None)
    head = DraftHead(lm_head, 2)
    hidden = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 0]])
    assert head.draft_ids(hidden, torch.zeros(1, 2, dtype=torch.int64)).tolist() == [[1]]
    lm_head.weight = torch.eye(4).flip(0)
    assert head.draft_ids(hidden, torch.zeros(1, 2, dtype=torch.int64)).tolist() == [[2]]


def test_vocabularies_that_it_does_not_know_are_refused(monkeypatch) -> None:
    """Fails where added or quantised vocabulary is silently ignored."""
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))
    shard = SimpleNamespace(num_added_elements=2, num_org_elements=4, org_vocab_start_index=0)
    with pytest.raises(ValueError, match="added vocabulary"):
        DraftHead(SimpleNamespace(weight=torch.eye(4), shard_indices=shard), 2)
    with pytest.raises(ValueError, match="dense"):
        DraftHead(SimpleNamespace(weight=torch.zeros(4, 4, dtype=torch.int8), shard_indices=None), 2)

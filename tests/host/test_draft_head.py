"""The draft's head under tensor parallelism: every rank ends with the argmax of the whole vocabulary."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from stand_ins import Group, PackedHead, split_head

from sglang_dflash.host.worker import draft_heads
from sglang_dflash.host.worker.draft_heads import DraftHead

BLOCK_SIZE = 4


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
    heads = [DraftHead(head, BLOCK_SIZE) for head in split_head(weight, ranks, 5)]
    block_ids = torch.zeros(batch, BLOCK_SIZE, dtype=torch.int64)
    drafted = group.run(lambda rank: heads[rank].draft_ids(hidden, block_ids))
    logits = (hidden.float() @ weight.float().T).view(batch, BLOCK_SIZE, -1)[:, 1:]
    expected = logits.argmax(-1)
    for ids in drafted:
        assert ids.dtype == torch.int64 and torch.equal(ids, expected)


@pytest.mark.parametrize("special", [None, float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_chances_of_one(ranks: int, special: float | None, monkeypatch) -> None:
    """Fails where a rank's share of the probability is left out, a draft has another rank's offset, a tie goes to a
    higher id, or padding wins."""
    group, whole = Group(ranks), Group(1)
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    weight = torch.randint(-1, 2, (ranks * 5 - 2, 8), generator=torch.Generator().manual_seed(ranks)).float()
    hidden = torch.randint(-1, 2, (3 * BLOCK_SIZE, 8), generator=torch.Generator().manual_seed(5)).float()
    if special is not None:
        weight[[1, 5]] = special
    heads = [DraftHead(head, BLOCK_SIZE) for head in split_head(weight, ranks, 5)]
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=whole))
    (one,) = (DraftHead(head, BLOCK_SIZE) for head in split_head(weight, 1, len(weight)))
    block_ids = torch.zeros(3, BLOCK_SIZE, dtype=torch.int64)
    expected = one.weighed(hidden, block_ids)
    for got in group.run(lambda rank: heads[rank].weighed(hidden, block_ids)):
        torch.testing.assert_close(got.log_probs, expected.log_probs)
        possible = expected.log_probs > float("-inf")
        assert torch.equal(got.ids[possible], expected.ids[possible])


def test_new_weights_are_drafted_with(monkeypatch) -> None:
    """Fails where the head still uses a weight that the host has replaced."""
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))
    lm_head = SimpleNamespace(weight=torch.eye(4), shard_indices=None)
    head = DraftHead(lm_head, 2)
    hidden = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 0]])
    assert head.draft_ids(hidden, torch.zeros(1, 2, dtype=torch.int64)).tolist() == [[1]]
    lm_head.weight = torch.eye(4).flip(0)
    assert head.draft_ids(hidden, torch.zeros(1, 2, dtype=torch.int64)).tolist() == [[2]]


@pytest.mark.parametrize("with_weight", [False, True], ids=["GGUF", "FP8"])
def test_a_quantised_head_drafts_through_its_method(with_weight: bool, monkeypatch) -> None:
    """Fails where packed values are multiplied as they stand, or padding wins."""
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-3, 4, (9, 8), generator=generator).float()
    lm_head = PackedHead(weight, padding=3)
    if with_weight:
        lm_head.weight = lm_head.qweight
    head = DraftHead(lm_head, BLOCK_SIZE)
    head.reserve(2)
    hidden = torch.randn(2 * BLOCK_SIZE, 8, generator=generator).abs()
    block_ids = torch.zeros(2, BLOCK_SIZE, dtype=torch.int64)
    expected = (hidden @ weight.T).view(2, BLOCK_SIZE, -1)[:, 1:].argmax(-1)
    assert torch.equal(head.draft_ids(hidden, block_ids), expected)
    head(hidden, block_ids)
    assert torch.equal(head.captured_ids, expected) and head.compared_logits[0] == len(weight)


def test_heads_that_it_does_not_know_are_refused(monkeypatch) -> None:
    """Fails where added vocabulary is ignored, or a quantised head is read as a dense one or split over ranks."""
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))
    shard = SimpleNamespace(num_added_elements=2, num_org_elements=4, org_vocab_start_index=0)
    with pytest.raises(ValueError, match="added vocabulary"):
        DraftHead(SimpleNamespace(weight=torch.eye(4), shard_indices=shard), 2)
    with pytest.raises(ValueError, match="dense"):
        DraftHead(SimpleNamespace(weight=torch.zeros(4, 4, dtype=torch.int8), shard_indices=None), 2)
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(2)))
    with pytest.raises(ValueError, match=r"--tp-size is 2 .* --tp-size 1 only"):
        DraftHead(PackedHead(torch.eye(4), 0), 2)

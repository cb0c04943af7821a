"""Domino's head against the host's own rollout, alone and on several ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.speculative.domino_utils import domino_greedy_rollout
from stand_ins import Group, split_head
from torch import nn

from sglang_dflash.host.worker import draft_heads
from sglang_dflash.host.worker.draft_heads import DominoHead, head_of

HIDDEN, UNITS, RANK, VOCAB, BLOCK = 12, 7, 5, 30, 4


def _model(shift_label: bool) -> SimpleNamespace:
    """What our head reads of the host's `DFlashDraftModel`."""
    gru = nn.GRU(HIDDEN, UNITS, bias=False, batch_first=True)
    projector = nn.Sequential(
        nn.Linear(HIDDEN + UNITS, RANK, bias=False), nn.SiLU(), nn.Linear(RANK, VOCAB, bias=False)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in [*gru.parameters(), *projector.parameters()]:
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return SimpleNamespace(prefix_gru=gru, embed_proj=projector, shift_label=shift_label, candidate_selector=None)


def _inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, nn.Embedding]:
    """Hidden states [B * rows, H], block ids [B, rows], the target's head [V, H] and embedding."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight, table = (torch.randn(n, HIDDEN, generator=generator) for n in (5 * rows, VOCAB, VOCAB))
    ids = torch.randint(VOCAB, (5, rows), generator=generator)
    return hidden, ids, weight, nn.Embedding.from_pretrained(table)


def _of_the_host(model: SimpleNamespace, rows: int) -> torch.Tensor:
    hidden, ids, weight, embedding = _inputs(rows)
    return domino_greedy_rollout(
        draft_hidden=hidden.view(*ids.shape, HIDDEN),
        bonus_tokens=ids[:, 0],
        target_embedding=embedding,
        lm_head_weight=weight,
        prefix_gru=model.prefix_gru,
        embed_proj=model.embed_proj,
        vocab_size=VOCAB,
        shift_label=model.shift_label,
        candidate_pool_size=0,
        in_cuda_graph=False,
    )


@pytest.mark.parametrize("shift_label", [False, True])
@pytest.mark.parametrize("rows", [2, 3, BLOCK])
def test_the_host_s_rollout(rows: int, shift_label: bool, monkeypatch) -> None:
    """Fails where our head drafts other ids than the host's own, at any width, or replays leave other ids."""
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=Group(1)))
    model = _model(shift_label)
    hidden, ids, weight, embedding = _inputs(rows)
    head = head_of(model, SimpleNamespace(weight=weight, shard_indices=None), rows, embedding)
    assert isinstance(head, DominoHead)
    head.reserve(6)
    with torch.inference_mode():
        expected = _of_the_host(model, rows)
        drafts = head.draft_ids(hidden, ids)
        head(hidden, ids)
    assert torch.equal(drafts, expected) and torch.equal(head.captured_ids[:5], expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_drafts_the_same(ranks: int, monkeypatch) -> None:
    """Fails where a rank corrects its span with another span's weights, or follows its own best id."""
    group = Group(ranks)
    monkeypatch.setattr(draft_heads, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    model = _model(shift_label=False)
    hidden, ids, weight, embedding = _inputs(BLOCK)
    heads = [head_of(model, head, BLOCK, embedding) for head in split_head(weight, ranks, -(-VOCAB // ranks))]
    expected = _of_the_host(model, BLOCK)
    assert all(torch.equal(drafts, expected) for drafts in group.run(lambda rank: heads[rank].draft_ids(hidden, ids)))

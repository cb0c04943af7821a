"""Domino's rollout against torch's own GRU and layers, one request at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang_dflash import ops

HIDDEN, UNITS, RANK, VOCAB = 6, 5, 3, 11


def _modules(seed: int = 0) -> tuple[nn.GRU, nn.Sequential, nn.Embedding, nn.Linear]:
    torch.manual_seed(seed)
    gru = nn.GRU(HIDDEN, UNITS, bias=False, batch_first=True)
    projector = nn.Sequential(
        nn.Linear(HIDDEN + UNITS, RANK, bias=False), nn.SiLU(), nn.Linear(RANK, VOCAB, bias=False)
    )
    modules = gru, projector, nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    for module in modules:
        for weight in module.parameters():
            nn.init.normal_(weight)
    return modules


@torch.inference_mode()
def _by_hand(row_hidden: torch.Tensor, anchor: int, seed: int = 0) -> list[int]:
    """One request's drafts; the GRU reads the whole prefix anew before each."""
    gru, projector, embedding, head = _modules(seed)
    drafts = [int(head(row_hidden[0]).argmax())]
    for hidden in row_hidden[1:]:
        _, state = gru(embedding(torch.tensor([[anchor, *drafts]])))
        correction = projector(torch.cat((hidden, state[0, 0])))
        drafts.append(int((head(hidden) + correction).argmax()))
    return drafts


@pytest.mark.parametrize(("batch", "slots"), [(1, 1), (1, 2), (4, 7)])
def test_rollout_against_torch(batch: int, slots: int) -> None:
    """Fails where the GRU misses a token, a correction takes another row's state, or the first draft is corrected."""
    gru, projector, embedding, head = _modules()
    hidden = torch.randn(batch, slots, HIDDEN, generator=torch.Generator().manual_seed(slots))
    anchors = torch.arange(batch) % VOCAB
    weights = ops.DominoWeights(gru.weight_ih_l0, gru.weight_hh_l0, projector[0].weight, projector[2].weight)
    with torch.inference_mode():
        drafts = ops.domino_rollout(weights, hidden, head(hidden), anchors, embedding, lambda logits: logits.argmax(-1))
    assert drafts.dtype == torch.int64 and drafts.shape == (batch, slots)
    assert drafts.tolist() == [_by_hand(rows, anchor) for rows, anchor in zip(hidden, anchors.tolist(), strict=True)]
    if slots == 7:
        assert not torch.equal(drafts, head(hidden).argmax(-1)), "the correction changes nothing"

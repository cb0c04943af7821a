"""Domino's projector, under the names of its checkpoints."""

from __future__ import annotations

from torch import nn

from sglang_dflash import ops
from sglang_dflash.core.draft_heads import Domino


def domino_projector(hidden_size: int, domino: Domino) -> nn.Sequential:
    """Maps a row's hidden state and the GRU's to a correction of its logits; `ops.domino_rollout` reads its weights."""
    down = nn.Linear(hidden_size + domino.gru_size, domino.rank, bias=False)
    return nn.Sequential(down, nn.SiLU(), nn.Linear(domino.rank, domino.vocab_size, bias=False))


def domino_weights(gru: nn.GRU, projector: nn.Sequential) -> ops.DominoWeights:
    """The weights as the op takes them."""
    return ops.DominoWeights(gru.weight_ih_l0, gru.weight_hh_l0, projector[0].weight, projector[2].weight)

"""The specification of Domino's rollout: each draft corrects the next row's logits, through a GRU over the drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F


class DominoWeights(NamedTuple):
    """Domino's weights: a GRU of G units, and a projector of rank R.

    Fields:
        input_gates: [3 * G, H]; hidden_gates: [3 * G, G]; both in torch's order: reset, update, new.
        down: [R, H + G].
        up: [V, R]; of the token ids whose logits are given.
    """

    input_gates: torch.Tensor
    hidden_gates: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor


def gru_step(weights: DominoWeights, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """torch's GRU without biases. x: [B, H]; state: [B, G]. Returns the new state."""
    reset_x, update_x, new_x = F.linear(x, weights.input_gates).chunk(3, dim=-1)
    reset_s, update_s, new_s = F.linear(state, weights.hidden_gates).chunk(3, dim=-1)
    update = torch.sigmoid(update_x + update_s)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_s) * new_s)
    return new + update * (state - new)


def corrected(weights: DominoWeights, logits: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A row's logits plus the correction from its hidden state and the GRU's. logits: [B, V]; hidden: [B, H]."""
    low = F.silu(F.linear(torch.cat((hidden, state), dim=-1), weights.down))
    return logits + F.linear(low, weights.up)


def domino_rollout(
    weights: DominoWeights,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    anchor_ids: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
    argmax: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The drafts of each block, one after the other. The first has no correction.

    Args:
        hidden: [B, S, H]; the rows that the drafts come from.
        logits: [B, S, V]; the target's head over them.
        anchor_ids: [B] int64.
        embed: the target's embedding, [B] ids -> [B, H], in the weights' dtype.
        argmax: [B, V] -> [B] int64; under tensor parallelism V is a rank's span, and the ids are of all ranks.

    Returns:
        [B, S] int64.
    """
    state = gru_step(weights, embed(anchor_ids), hidden.new_zeros(len(hidden), weights.hidden_gates.shape[1]))
    drafts = [argmax(logits[:, 0].contiguous())]
    for slot in range(1, hidden.shape[1]):
        state = gru_step(weights, embed(drafts[-1]), state)
        drafts.append(argmax(corrected(weights, logits[:, slot], hidden[:, slot], state)))
    return torch.stack(drafts, dim=1)

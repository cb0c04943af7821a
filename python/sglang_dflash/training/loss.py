"""The training loss: cross-entropy of every masked row, weighted by its position in the block."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sglang_dflash.training.blocks import IGNORED

# Number of rows whose logits are in memory at a time: 2048 rows of a 150k vocabulary are 1.2 GB in float32.
_ROWS_AT_ONCE = 2048


def decay_weights(labels: torch.Tensor, gamma: float) -> torch.Tensor:
    """exp(-(k-1)/gamma) for block row k >= 1, zero where there is no label (paper, appendix A.1).

    Args:
        labels: [..., K] int64.
    """
    index = torch.arange(labels.shape[-1], device=labels.device)
    return torch.exp(-(index - 1) / gamma) * (labels != IGNORED)


def dpace_weights(labels: torch.Tensor, losses: torch.Tensor, alpha: float) -> torch.Tensor:
    """D-PACE's weights (arXiv 2605.18810): how much of the block's acceptance depends on row k.

    p_k is the draft's probability of row k's label, s_k = (1 - alpha) p_k + alpha, and r_k = s_1 ... s_k.
    The weight of row k is the sum of r_j over all labelled rows j >= k.

    Args:
        labels: [..., K] int64.
        losses: [..., K] float32, -log p; any value where there is no label.
    """
    labelled = labels != IGNORED
    smooth = (1 - alpha) * torch.exp(-losses.detach()) + alpha
    running = smooth.masked_fill(~labelled, 1.0).cumprod(-1) * labelled
    return running.flip(-1).cumsum(-1).flip(-1) * labelled


def row_losses(
    hidden: torch.Tensor, labels: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """-log p(label) of every labelled row, zero elsewhere. The backward pass computes the logits again.

    Args:
        hidden: [..., H]; the draft's final hidden states.
        labels: [...] int64.
        head: the target's, [N, H] -> [N, V].

    Returns:
        [...] float32.
    """

    def some(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(rows).float(), wanted, reduction="none")

    labelled = labels != IGNORED
    parts = zip(hidden[labelled].split(_ROWS_AT_ONCE), labels[labelled].split(_ROWS_AT_ONCE), strict=True)
    losses = [checkpoint(some, rows, wanted, use_reentrant=False) for rows, wanted in parts]
    out = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
    return out.masked_scatter(labelled, torch.cat(losses)) if losses else out


def weighted_mean(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum(w * loss) / sum(w); zero where nothing is labelled."""
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(losses.dtype).tiny)

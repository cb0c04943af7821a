"""The training loss: cross-entropy of every masked row, weighted by its position in the block; and the selector's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sglang_dflash.reference import CandidateSelector
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
        return F.cross_entropy(head(rows).float(), wanted, reduction="none")[None]

    return _labelled_rows(some, labels, hidden)[0]


def selected_losses(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    previous_ids: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    selector: CandidateSelector,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_losses`, and the selector's: -log of the label's share among the row's candidates, behind the true token.

    A row whose label is no candidate has no loss of the selector: no walk can reach the label.

    Args:
        previous_ids: [...] int64; the true token before each labelled row.

    Returns:
        Both [...] float32.
    """

    def some(rows: torch.Tensor, wanted: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        logits = head(rows)
        losses = F.cross_entropy(logits.float(), wanted, reduction="none")
        scores, ids = selector.scored(rows, logits, previous)
        right = ids == wanted[:, None]
        chosen = -(scores.float().log_softmax(-1) * right).sum(-1)
        return torch.stack((losses, chosen))

    plain, chosen = _labelled_rows(some, labels, hidden, previous_ids)
    return plain, chosen


def _labelled_rows(
    losses: Callable[..., torch.Tensor], labels: torch.Tensor, hidden: torch.Tensor, *more: torch.Tensor
) -> list[torch.Tensor]:
    """Each kind of loss of every labelled row, zero elsewhere. `losses` maps some rows' hidden states, labels and so on
    to [kinds, N]."""
    labelled = labels != IGNORED
    values = [value[labelled].split(_ROWS_AT_ONCE) for value in (hidden, labels, *more)]
    parts = [checkpoint(losses, *part, use_reentrant=False) for part in zip(*values, strict=True)]
    out = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
    return [out.masked_scatter(labelled, found) for found in torch.cat(parts, dim=1)]


def weighted_mean(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum(w * loss) / sum(w); zero where nothing is labelled."""
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(losses.dtype).tiny)

"""The training loss: cross-entropy of every masked row, weighted by its position in the block; and the selector's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class LossHead:
    """The target's head as a loss uses it: over all ids, or over M of them.

    Fields:
        head: [N, H] -> [N, M].
        labels: [...] int64; the columns of the rows' labels, IGNORED where there is none.
        ids: [M] int64, rising, the ids of the columns; None: column i is id i.
        raised: [M] float32, what the softmax adds to the logits.
    """

    head: Callable[[torch.Tensor], torch.Tensor]
    labels: torch.Tensor
    ids: torch.Tensor | None = None
    raised: torch.Tensor | float = 0.0


def row_losses(hidden: torch.Tensor, over: LossHead) -> torch.Tensor:
    """-log p(label) of every labelled row, zero elsewhere. The backward pass computes the logits of many rows again.

    Args:
        hidden: [..., H]; the draft's final hidden states.

    Returns:
        [...] float32.
    """

    def some(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(over.head(rows).float() + over.raised, wanted, reduction="none")[None]

    return _labelled_rows(some, over.labels, hidden)[0]


class ShortLoss:
    """A softmax over fewer ids than all: the frequent ones, the labels, and drawn ones that stand for the others.

    The logit of a drawn id is raised by the log of how many ids it stands for, so the sum below the softmax is the
    whole one in the mean (sampled softmax, arXiv 1412.2007).
    """

    def __init__(self, counts: torch.Tensor, size: int) -> None:
        """
        Args:
            counts: [V] int64; how often each id is a label.
            size: number of ids, a quarter of them drawn; labels that are not frequent come on top.
        """
        order = counts.argsort(descending=True, stable=True)
        frequent = min(len(counts), size - size // 4)
        self._frequent, self._others = order[:frequent].sort().values, order[frequent:]
        self._drawn = min(size // 4, len(self._others))
        self._vocab_size = len(counts)

    def drawn(
        self,
        labels: torch.Tensor,
        head_of: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]],
        generator: torch.Generator | None,
    ) -> LossHead:
        """The head over the ids of one micro-batch.

        Args:
            labels: [...] int64.
            head_of: the target's head of some ids [M] int64.
            generator: a CPU generator.
        """
        wanted = labels[labels != IGNORED].unique().cpu()
        rare = wanted[torch.isin(wanted, self._others)]
        others = self._others[~torch.isin(self._others, rare)]
        drawn = others[torch.randperm(len(others), generator=generator)[: self._drawn]]
        ids, order = torch.cat((self._frequent, rare, drawn)).sort()
        raised = torch.zeros(len(ids))
        if len(drawn):
            raised[-len(drawn) :] = math.log(len(others) / len(drawn))
        ids, raised = ids.to(labels.device), raised[order].to(labels.device)
        column = torch.full((self._vocab_size,), IGNORED, device=labels.device)
        column[ids] = torch.arange(len(ids), device=labels.device)
        return LossHead(head_of(ids), column[labels.clamp(min=0)].masked_fill(labels == IGNORED, IGNORED), ids, raised)


def selected_losses(
    hidden: torch.Tensor, over: LossHead, previous_ids: torch.Tensor, selector: CandidateSelector
) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_losses`, and the selector's: -log of the label's share among the row's candidates, behind the true token.

    A row whose label is no candidate has no loss of the selector: no walk can reach the label.

    Args:
        previous_ids: [...] int64; the true token before each labelled row.

    Returns:
        Both [...] float32.
    """

    def some(rows: torch.Tensor, wanted: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        logits = over.head(rows)
        losses = F.cross_entropy(logits.float() + over.raised, wanted, reduction="none")
        scores, ids = selector.scored(rows, logits, previous, over.ids)
        right = ids == (wanted if over.ids is None else over.ids[wanted])[:, None]
        chosen = -(scores.float().log_softmax(-1) * right).sum(-1)
        return torch.stack((losses, chosen))

    plain, chosen = _labelled_rows(some, over.labels, hidden, previous_ids)
    return plain, chosen


def _labelled_rows(
    losses: Callable[..., torch.Tensor], labels: torch.Tensor, hidden: torch.Tensor, *more: torch.Tensor
) -> list[torch.Tensor]:
    """Each kind of loss of every labelled row, zero elsewhere. `losses` maps some rows' hidden states, labels and so on
    to [kinds, N]. Rows that fit into one part keep their logits for the backward pass."""
    labelled = labels != IGNORED
    values = [value[labelled].split(_ROWS_AT_ONCE) for value in (hidden, labels, *more)]
    if len(values[0]) == 1:
        parts = [losses(*(value for (value,) in values))]
    else:
        parts = [checkpoint(losses, *part, use_reentrant=False) for part in zip(*values, strict=True)]
    out = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
    return [out.masked_scatter(labelled, found) for found in torch.cat(parts, dim=1)]


def weighted_mean(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum(w * loss) / sum(w); zero where nothing is labelled."""
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(losses.dtype).tiny)

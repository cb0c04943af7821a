"""What a DFlash2 draft has beyond the plain one: convolutions within the block, and the selector of its drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from sglang_dflash import ops
from sglang_dflash.core.draft_heads import Convolution, Selector


class GroupedConvolution(nn.Module):
    """Convolves the rows of each block before and behind a sublayer. One projection of the sublayer's input gives the
    kernels of both."""

    def __init__(self, hidden_size: int, convolution: Convolution) -> None:
        super().__init__()
        self.taps, self.groups = convolution.taps, hidden_size // convolution.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.taps * self.groups, bias=False)

    def initialize(self) -> None:
        """Makes it the identity."""
        identity = torch.zeros_like(self.base_kernel)
        identity[:, 0] = 1.0
        init.copy_(self.base_kernel, identity)
        init.zeros_(self.kernel_projection.weight)

    def prepare(self, x: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [B, Q, H], Q a multiple of `block_size`. Returns the sublayer's input, [B, Q, H], and what `finish` needs,
        [B, Q, taps, G]."""
        before, behind = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups)).unbind(-3)
        return self._convolve(x, before, 0, block_size), behind

    def finish(self, x: torch.Tensor, delta: torch.Tensor, block_size: int) -> torch.Tensor:
        """x: [B, Q, H]; the sublayer's output."""
        return self._convolve(x, delta, 1, block_size)

    def _convolve(self, x: torch.Tensor, delta: torch.Tensor, side: int, block_size: int) -> torch.Tensor:
        return ops.grouped_conv(x.flatten(0, 1), delta.flatten(0, 1), self.base_kernel[side], block_size).view_as(x)


class Scored(NamedTuple):
    """The candidates of N rows behind the true tokens before them.

    Fields:
        scores: [N, k] float32.
        ids: [N, k] int64.
    """

    scores: torch.Tensor
    ids: torch.Tensor


class CandidateSelector(nn.Module):
    """Chooses each draft among its row's best candidates, given the draft before it."""

    def __init__(self, hidden_size: int, selector: Selector) -> None:
        super().__init__()
        self.config = selector
        self.predecessor_codebook = nn.Parameter(torch.empty(selector.vocab_size, selector.rank))
        self.successor_codebook = nn.Parameter(torch.empty(selector.vocab_size, selector.rank))
        self.hidden_projection = nn.Linear(hidden_size, selector.rank, bias=False)

    def initialize(self) -> None:
        """Leaves it without influence: each draft is its row's best candidate."""
        init.normal_(self.predecessor_codebook)
        init.zeros_(self.successor_codebook)

    def drafts(self, hidden: torch.Tensor, logits: torch.Tensor, anchor_ids: torch.Tensor) -> torch.Tensor:
        """The greedy walk.

        Args:
            hidden: [B, S, H]; rows 1..S of each block, final-normed.
            logits: [B, S, V]; the target's head over them.
            anchor_ids: [B] int64.

        Returns:
            [B, S] int64.
        """
        candidates = self._candidates(logits.flatten(0, 1))
        tables = (self.predecessor_codebook, self.successor_codebook)
        return ops.greedy_walk(candidates, self.hidden_projection(hidden).flatten(0, 1), anchor_ids, *tables).ids

    def scored(
        self, hidden: torch.Tensor, logits: torch.Tensor, previous_ids: torch.Tensor, ids: torch.Tensor | None = None
    ) -> Scored:
        """
        Args:
            hidden: [N, H].
            logits: [N, V], or [N, M] of `ids` [M] int64, rising.
            previous_ids: [N] int64, the tokens before the rows.
        """
        candidates = self._candidates(logits)
        if ids is not None:
            candidates = ops.Candidates(candidates.values, ids[candidates.ids])
        tables = (self.predecessor_codebook, self.successor_codebook)
        scores = ops.pair_scores(candidates, self.hidden_projection(hidden), previous_ids[:, None], *tables)
        return Scored(scores[:, 0], candidates.ids)

    def _candidates(self, logits: torch.Tensor) -> Any:
        values, ids = ops.top_candidates(logits, self.config.top_k)
        return ops.Candidates(ops.candidate_logits(values, self.config.multiplier, self.config.softcap), ids)

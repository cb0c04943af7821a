"""Chooses the drafts from the draft's hidden states, with the target's head; on CUDA, within the draft's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.models.dflash import _radix_topk
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight

from sglang_dflash import ops
from sglang_dflash.core.draft_folder import OwnHead
from sglang_dflash.core.draft_vocab import DraftVocabulary
from sglang_dflash.host.worker.sharded_logits import best_of_ranks, drafts_of_ranks
from sglang_dflash.host.worker.short_head import FEWEST_IDS, DraftIds, ShortHead

Embed = Callable[[torch.Tensor], torch.Tensor]
Choose = Callable[[torch.Tensor], torch.Tensor]


class DraftHead:
    """Argmax of the target's head over the rows of every block that give drafts; with a `ShortHead`, among its ids.

    Ties: the lowest id wins; among the ids of a `ShortHead`, the lowest place. Under tensor parallelism each rank holds
    a span of the vocabulary, and all end with the same ids.
    """

    first_row = 1
    """The row of a block that gives the first draft: the one behind the anchor, or the anchor's (0)."""

    def __init__(self, lm_head: Any, block_size: int) -> None:
        self._lm_head = lm_head
        weight: Any = getattr(lm_head, "weight", None)
        shard = getattr(lm_head, "shard_indices", None)
        tp_group = get_parallel().tp_group
        self._dense = is_dense_head_weight(weight)
        if shard is not None and shard.num_added_elements:
            raise ValueError("DFLASH needs a target whose lm_head has no added vocabulary.")
        if not self._dense and (shard is None or not hasattr(lm_head, "quant_method")):
            raise ValueError("DFLASH needs a target whose lm_head is dense, or quantised by one of SGLang's methods.")
        if not self._dense and tp_group.world_size > 1:
            raise ValueError(
                f"--tp-size is {tp_group.world_size} and the target's lm_head is quantised "
                f"({type(lm_head.quant_method).__name__}): with DFLASH, such a head is served with --tp-size 1 only."
            )
        self._vocab_size = shard.num_org_elements if shard is not None else weight.shape[0]  # of this rank
        self._first_id = shard.org_vocab_start_index if shard is not None else 0
        self._group = tp_group if shard is not None and tp_group.world_size > 1 else None
        assert self._vocab_size > 0, f"rank {tp_group.rank_in_group} of {tp_group.world_size} holds no token ids"
        self._block_size = block_size
        self._short: ShortHead | OwnHead | None = None  # what is chosen among; None: all ids
        self._fewest_ids = FEWEST_IDS
        self._device = weight.device if self._dense else next(lm_head.parameters()).device
        self._kernels = ops.choose_kernels(self._device, self.compared_logits[1])
        self.captured_ids = torch.empty(0, dtype=torch.int64, device=self._device)
        self.captured_log_probs: torch.Tensor | None = None  # None: drafts come without their probabilities

    @property
    def why_whole(self) -> str | None:
        """Why the head chooses among all ids; None if it can choose among fewer."""
        return None if self._dense else "the target's head is quantised"

    def use_own(self, own: OwnHead) -> None:
        """Chooses by a head that the draft brings, each rank among the ids of its span; to be called before graphs are
        captured."""
        ids = own.ids - self._first_id
        here = (ids >= 0) & (ids < self._vocab_size)
        if not here.any():
            raise ValueError(
                f"DFLASH cannot start: none of the draft's {len(own.ids)} ids (d2t) are of rank "
                f"{get_parallel().tp_group.rank_in_group}; give a smaller --tp-size."
            )
        weight = own.weight[here].to(self._device, self._lm_head.weight.dtype if self._dense else torch.bfloat16)
        self._short, self._dense = OwnHead(ids[here].to(self._device), weight), True
        self._kernels = ops.choose_kernels(self._device, weight.dtype)

    def shorten(self, draft_ids: DraftIds, kept: Sequence[int]) -> ShortHead | None:
        """Chooses among fewer ids from now on; to be called before graphs are captured.

        Args:
            draft_ids: N of the whole vocabulary; each rank takes its share of its span.
            kept: ids that are always in.

        Returns:
            None if the span has no more ids than its share.
        """
        ranks = 1 if self._group is None else self._group.world_size
        assert draft_ids.count is not None and self.why_whole is None
        count = max(self._fewest_ids, -(-draft_ids.count // ranks))
        if count < self._vocab_size:
            vocabulary = DraftVocabulary(self._vocab_size, count, kept, draft_ids.first, self._first_id)
            short = self._short = ShortHead(self._lm_head, vocabulary)
            return short
        return None

    def draft_ids(self, hidden: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """hidden: [B * R, H]; block_ids: [B, R] int64, the anchors first. Returns [B, R - `first_row`] int64."""
        rows = self._rows(hidden, block_ids)
        return self._choose(rows, self._logits(rows), block_ids[:, 0]).view(len(block_ids), -1)

    def weighed(self, hidden: torch.Tensor, block_ids: torch.Tensor) -> ops.Drafts:
        """`draft_ids` and their log-probabilities."""
        rows = self._rows(hidden, block_ids)
        ids, log_probs = self._best(self._logits(rows))
        return ops.Drafts(ids.view(len(block_ids), -1), log_probs.view(len(block_ids), -1))

    def candidates(self, hidden: torch.Tensor, block_ids: torch.Tensor, count: int) -> ops.Drafts:
        """The `count` likeliest ids of each row and their log-probabilities, [B, R - `first_row`, count] each. For one
        rank."""
        assert self._group is None
        ids, log_probs = ops.top_drafts(self._logits(self._rows(hidden, block_ids)), count)
        shape = (len(block_ids), -1, count)
        return ops.Drafts(self._ids(ids).view(shape), log_probs.view(shape))

    def _best(self, logits: torch.Tensor) -> ops.Drafts:
        """logits: [N, V] of this rank. Returns the best ids of the whole vocabulary, [N] each."""
        if self._group is None and logits.is_cuda:
            columns = self._kernels.row_argmax(logits)
            weights = (logits - logits.gather(1, columns[:, None])).exp_()  # no float32 copy of the logits
            log_probs = -weights.sum(1, dtype=torch.float32).log()
            return ops.Drafts(self._ids(columns), torch.where(log_probs.isnan(), float("-inf"), log_probs))
        columns, log_probs = self._kernels.best_log_probs(logits)
        if self._group is None:
            return ops.Drafts(self._ids(columns), log_probs)
        best = logits.gather(1, columns[:, None])[:, 0].float()
        return drafts_of_ranks(self._group, best, self._ids(columns) + self._first_id, best - log_probs)

    def weigh_drafts(self) -> None:
        """Captures the drafts' log-probabilities, too, from now on; to be called before graphs are captured."""
        self.captured_log_probs = torch.empty(0, self._block_size - 1, device=self._device)

    def _rows(self, hidden: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        # `reshape` makes the rows dense, for one product of all rows. On a slice, torch multiplies request by request.
        return hidden.view(*block_ids.shape, -1)[:, self.first_row :].reshape(-1, hidden.shape[-1])

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [N, H]. Returns [N, V], V this rank's span of the vocabulary, without SGLang's padding; or its ids in
        the `ShortHead`, in their places."""
        if not self._dense:  # packed rows cannot be sliced
            logits: torch.Tensor = self._lm_head.quant_method.apply(self._lm_head, rows, None)
            return logits[:, : self._vocab_size]
        weight = self._lm_head.weight[: self._vocab_size] if self._short is None else self._short.weight
        return F.linear(rows.to(weight.dtype), weight)

    def _ids(self, columns: torch.Tensor) -> torch.Tensor:
        """The ids, in this rank's span, of columns of the logits."""
        return columns if self._short is None else self._short.ids[columns]

    def _choose(self, rows: torch.Tensor, logits: torch.Tensor, anchor_ids: torch.Tensor) -> torch.Tensor:
        """rows: [B * (K-1), H]; logits: [B * (K-1), V]; anchor_ids: [B]. Returns B * (K-1) ids, int64."""
        return self._argmax(logits)

    def _argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [N, V] of this rank. Returns [N] int64, of the whole vocabulary."""
        if self._group is None:
            return self._ids(self._kernels.row_argmax(logits))
        best, columns = logits.max(-1)
        return best_of_ranks(self._group, best, self._ids(columns) + self._first_id)

    @property
    def compared_logits(self) -> tuple[int, torch.dtype]:
        """Columns and dtype of the logits whose argmax is taken."""
        if self._short is not None:
            return len(self._short.ids), self._short.weight.dtype
        return self._vocab_size, self._lm_head.weight.dtype if self._dense else torch.bfloat16

    def reserve(self, max_batch: int) -> None:
        """Allocates the buffers that graph replays write."""
        shape = (max_batch, self._block_size - 1)
        self.captured_ids = torch.empty(shape, dtype=torch.int64, device=self._device)
        if self.captured_log_probs is not None:
            self.captured_log_probs = torch.empty(shape, device=self._device)

    def __call__(self, hidden: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Called while SGLang captures the draft's graph. hidden: [B * R, H]; block_ids: [B, R]."""
        batch, drafts = len(block_ids), block_ids.shape[1] - self.first_row
        if self.captured_log_probs is None:
            self.captured_ids[:batch, :drafts].copy_(self.draft_ids(hidden, block_ids))
            return
        ids, log_probs = self.weighed(hidden, block_ids)
        self.captured_ids[:batch, :drafts].copy_(ids)
        self.captured_log_probs[:batch, :drafts].copy_(log_probs)


class SelectorHead(DraftHead):
    """DFlash2's selector, walked greedily: each draft is the best of its row's candidates behind the draft before it.

    Ties: the lowest id wins, except at the cut of the candidates on CUDA, where SGLang's kernel decides. Each rank
    holds the selector's tables as a whole; the ranks exchange their candidates, and all end with the same ids.
    """

    def __init__(self, lm_head: Any, block_size: int, model: Any) -> None:
        """model: SGLang's `DFlash2DraftModel`. Its weights are read at every call, so updates take effect."""
        super().__init__(lm_head, block_size)
        self._selector = model.candidate_selector
        self._fewest_ids = max(FEWEST_IDS, self._selector.top_k)
        self._multiplier = model.draft_config.output_multiplier
        self._softcap = model.draft_config.final_logit_softcapping

    def weighed(self, hidden: torch.Tensor, block_ids: torch.Tensor) -> ops.Drafts:
        rows = self._rows(hidden, block_ids)
        return self._walk(rows, self._logits(rows), block_ids[:, 0])

    def _choose(self, rows: torch.Tensor, logits: torch.Tensor, anchor_ids: torch.Tensor) -> torch.Tensor:
        return self._walk(rows, logits, anchor_ids).ids

    def _walk(self, rows: torch.Tensor, logits: torch.Tensor, anchor_ids: torch.Tensor) -> ops.Drafts:
        values, ids = self._candidates(logits)
        candidates = ops.Candidates(ops.candidate_logits(values, self._multiplier, self._softcap), ids)
        selector = self._selector
        keys = selector.hidden_projection(rows.to(selector.hidden_projection.weight.dtype))
        tables = (selector.predecessor_codebook, selector.successor_codebook)
        return ops.greedy_walk(candidates, keys, anchor_ids, *tables)

    def _candidates(self, logits: torch.Tensor) -> ops.Candidates:
        """logits: [N, V] of this rank. Returns the candidates of the whole vocabulary, [N, k]."""
        count = self._selector.top_k
        if logits.shape[1] < count:  # the last rank's span may be that short
            logits = F.pad(logits, (0, count - logits.shape[1]), value=float("-inf"))
        if logits.is_cuda:
            own = ops.by_id(*_radix_topk(logits.contiguous(), count))  # it takes no rows cropped from longer ones
        else:
            own = ops.top_candidates(logits, count)
        if self._short is not None:
            own = ops.by_id(own.values, self._short.ids[own.ids])
        if self._group is None:
            return own
        pairs = torch.stack((own.values.double(), (own.ids + self._first_id).double()))  # float64 holds both exactly
        values, ids = self._group.all_gather(pairs, dim=-1)  # [N, ranks * k] each, ids rising
        best = ops.top_candidates(values, count)  # of columns
        return ops.Candidates(best.values, ids.gather(1, best.ids).long())


class DominoHead(DraftHead):
    """Domino's rollout: each draft's logits are corrected by the drafts before it, over the whole vocabulary.

    Each rank corrects its own span; per draft, the ranks exchange only the best id. So there is no pool of candidates,
    with which SGLang's own worker shortens the rollout (`--speculative-domino-candidate-pool-size`).
    """

    def __init__(self, lm_head: Any, block_size: int, model: Any, embed: Embed) -> None:
        """
        Args:
            model: SGLang's `DFlashDraftModel` of a Domino checkpoint. Its weights are read at every call.
            embed: the target's embedding.
        """
        super().__init__(lm_head, block_size)
        self._gru, self._projector, self._embed = model.prefix_gru, model.embed_proj, embed
        self._first_row = 0 if model.shift_label else 1

    @property
    def why_whole(self) -> str | None:
        return "Domino's projector corrects the logits of all ids"

    def weighed(self, hidden: torch.Tensor, block_ids: torch.Tensor) -> ops.Drafts:
        log_probs: list[torch.Tensor] = []

        def best(logits: torch.Tensor) -> torch.Tensor:
            ids, own = self._best(logits)
            log_probs.append(own)
            return ids

        ids = self._roll_out(hidden, block_ids, best)
        return ops.Drafts(ids, torch.stack(log_probs, dim=1))

    def draft_ids(self, hidden: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return self._roll_out(hidden, block_ids, self._argmax)

    def _roll_out(self, hidden: torch.Tensor, block_ids: torch.Tensor, best: Choose) -> torch.Tensor:
        """best: logits [B, V] to ids [B] int64. Returns [B, D-1] int64."""
        requests, block_size = block_ids.shape
        rows = hidden.view(requests, block_size, -1)[:, self._first_row :][:, : block_size - 1]
        gru, up = self._gru, self._projector[2].weight[self._first_id : self._first_id + self._vocab_size]
        weights = ops.DominoWeights(gru.weight_ih_l0, gru.weight_hh_l0, self._projector[0].weight, up)
        logits = self._logits(rows.reshape(-1, rows.shape[-1])).view(requests, block_size - 1, -1)

        def embed(ids: torch.Tensor) -> torch.Tensor:
            return self._embed(ids).to(up.dtype)

        return ops.domino_rollout(weights, rows.to(up.dtype), logits, block_ids[:, 0], embed, best)


def head_of(model: Any, lm_head: Any, block_size: int, embed: Embed, anchor_first: bool = False) -> DraftHead:
    """The head of a draft, SGLang's `DFlashDraftModel` or `DFlash2DraftModel`. embed: the target's, ids to [..., H]."""
    if model.prefix_gru is not None:
        return DominoHead(lm_head, block_size, model, embed)
    if model.candidate_selector is not None:
        return SelectorHead(lm_head, block_size, model)
    head = DraftHead(lm_head, block_size)
    head.first_row = 0 if anchor_first else 1
    return head

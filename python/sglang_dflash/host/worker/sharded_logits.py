"""Under tensor parallelism the logits of verified rows stay on their ranks, which exchange only each row's best id."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.runtime_context import get_parallel

from sglang_dflash import ops

GATHERED_ROWS = 512


def best_of_ranks(group: Any, best: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The ids of the largest logits of all ranks; the lowest of equals, if ranks hold ascending spans of ids.

    Args:
        best, ids: [...]; this rank's largest logits, and their ids in the whole vocabulary.

    Returns:
        [...] int64, the same on every rank.
    """
    pairs = torch.stack((best.double(), ids.double()))  # one exchange; float64 holds both exactly
    best, ids = group.all_gather(pairs, dim=0).unflatten(0, (-1, 2)).unbind(1)  # [ranks, ...] each
    return ids.gather(0, best.argmax(0, keepdim=True))[0].long()


def drafts_of_ranks(group: Any, best: torch.Tensor, ids: torch.Tensor, totals: torch.Tensor) -> ops.Drafts:
    """`best_of_ranks` with the log-probabilities of the ids.

    Args:
        best, ids: [N]; see `best_of_ranks`.
        totals: [N]; logarithms of the sums over the exponentials of the rank's logits.

    Returns:
        [N] each, with log-probabilities among all ids; the same on every rank.
    """
    sent = torch.stack((best.double(), ids.double(), totals.double()))  # float64 holds ids exactly
    received = group.all_gather(sent, dim=0).unflatten(0, (-1, 3))  # [ranks, 3, N]
    best, ids, totals = torch.where(received.isnan(), float("-inf"), received).unbind(1)
    first = best.argmax(0, keepdim=True)  # of equals: ids rise with the rank
    log_probs = best.gather(0, first)[0] - totals.logsumexp(0)
    log_probs = torch.where(log_probs.isnan(), float("-inf"), log_probs)
    return ops.Drafts(ids.gather(0, first)[0].long(), log_probs.float())


class ShardedLogits:
    """The logits of a verify forward that were not gathered: a row's width is this rank's span of the vocabulary.

    SGLang would exchange B * W rows of the whole vocabulary in every step, while a greedy batch needs one id per row.
    SGLang's own worker spares that, too, but only for targets with a logit cap.
    """

    def __init__(self, processor: LogitsProcessor, lm_head: Any, kernels: ops.Kernels) -> None:
        """Changes `processor`: its verify forwards no longer gather. To be called before graphs are captured."""
        shard = lm_head.shard_indices
        self._group, self._kernels = get_parallel().tp_group, kernels
        self._vocab_size = processor.vocab_size
        self.span = shard.num_org_elements  # the rest of a shard's columns is padding
        self._width = lm_head.weight.shape[0]
        self._first_id = shard.org_vocab_start_index
        gathered = processor._get_logits

        def get_logits(hidden_states: torch.Tensor, head: Any, metadata: Any, *rest: Any, **more: Any) -> torch.Tensor:
            if not metadata.forward_mode.is_target_verify():
                whole: torch.Tensor = gathered(hidden_states, head, metadata, *rest, **more)
                return whole
            metadata.next_token_logits_buffer = _shard_buffer(metadata, len(hidden_states), self._width)
            processor.do_tensor_parallel_all_gather = False
            try:
                shard: torch.Tensor = gathered(hidden_states, head, metadata, *rest, **more)
            finally:
                processor.do_tensor_parallel_all_gather = True
            return shard

        processor._get_logits = get_logits

    @classmethod
    def of(cls, target_model: Any, lm_head: Any, kernels: ops.Kernels) -> ShardedLogits | None:
        """None if the target's logits are whole on every rank, or gathered in another way than over the ranks of
        `--tp-size`."""
        processors = [module for module in target_model.modules() if isinstance(module, LogitsProcessor)]
        shard = getattr(lm_head, "shard_indices", None)
        if get_parallel().tp_size == 1 or len(processors) != 1 or shard is None:
            return None
        (processor,) = processors
        plain = (
            processor.do_tensor_parallel_all_gather
            and not processor.use_attn_tp_group
            and not processor.do_tensor_parallel_all_gather_dp_attn
        )
        return cls(processor, lm_head, kernels) if plain else None

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [N, span]. Returns [N] int64, the lowest id of a tie; the same on every rank."""
        own = logits[:, : self.span]
        ids = self._kernels.row_argmax(own)
        return best_of_ranks(self._group, own.gather(1, ids[:, None])[:, 0], ids + self._first_id)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [N, span]. Returns [N, V], dense; some rows at a time, as the exchange makes two copies of them."""
        whole = logits.new_empty(len(logits), self._vocab_size)
        for begin in range(0, len(logits), GATHERED_ROWS):
            rows = slice(begin, begin + GATHERED_ROWS)
            whole[rows] = self._group.all_gather(logits[rows], dim=-1)[:, : self._vocab_size]
        return whole


def _shard_buffer(metadata: Any, rows: int, width: int) -> torch.Tensor | None:
    """The first `rows` * `width` elements of SGLang's buffer for logits, [rows, width].

    All captured graphs share that buffer. Its own shape is that of whole logits: without this view, each graph would
    keep logits of its own, some 22 GB for the default batch sizes of a vocabulary of 151,936 on two ranks.
    """
    buffer = metadata.next_token_logits_buffer
    if buffer is None or not buffer.is_contiguous() or buffer.numel() < rows * width:
        return None
    view: torch.Tensor = buffer.view(-1)[: rows * width].view(rows, width)
    return view

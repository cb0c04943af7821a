"""The public ops. `reference.py` specifies them; `block_conv.py`, `selector.py`, `domino.py` those of draft heads.

An op may have torch, native and Triton bodies. `row_argmax` and `accept_chain` choose theirs here at every call, by the
tensors' device and dtype. The others are chosen in `bodies.py`, once, when a caller is constructed. The first choice of
a Triton body imports Triton, so without a GPU nothing loads it.
"""

from __future__ import annotations

import torch

from sglang_dflash.ops import reference
from sglang_dflash.ops.attention import KVScratch, PagedRows, paged_attention, with_sink
from sglang_dflash.ops.batch_invariant import install_batch_invariant_kernels, place_matters
from sglang_dflash.ops.block_conv import grouped_conv
from sglang_dflash.ops.bodies import (
    INVARIANT_ATTENTION,
    TORCH_ATTENTION,
    TORCH_ROWS,
    Attention,
    PagedTable,
    RowOps,
    bodies,
    choose_attention,
    choose_rows,
    emitted_tokens,
    native_attention,
    native_write_and_attend,
)
from sglang_dflash.ops.domino import DominoWeights, domino_rollout
from sglang_dflash.ops.kv_buffers import KVBuffers, fits
from sglang_dflash.ops.murmur import murmur_hash32
from sglang_dflash.ops.native import install_linear, serves
from sglang_dflash.ops.penalties import Emitted, EmittedTokens, PenaltyParams, penalize, penalties_of
from sglang_dflash.ops.recurrent import TORCH_RECURRENT, RecurrentOps, choose_recurrent
from sglang_dflash.ops.recurrent_reference import StateRows
from sglang_dflash.ops.reference import (
    GreedyAcceptance,
    context_kv,
    extend_positions,
    gather_slots,
    project_context,
    recent_slots,
)
from sglang_dflash.ops.selector import (
    Candidates,
    by_id,
    candidate_logits,
    greedy_walk,
    pair_scores,
    top_candidates,
)
from sglang_dflash.ops.tiled_attention import invariant_attention

__all__ = [
    "INVARIANT_ATTENTION",
    "TORCH_ATTENTION",
    "TORCH_RECURRENT",
    "TORCH_ROWS",
    "Attention",
    "Candidates",
    "DominoWeights",
    "Emitted",
    "EmittedTokens",
    "GreedyAcceptance",
    "KVBuffers",
    "KVScratch",
    "PagedRows",
    "PagedTable",
    "PenaltyParams",
    "RecurrentOps",
    "RowOps",
    "StateRows",
    "accept_chain",
    "bodies",
    "by_id",
    "candidate_logits",
    "choose_attention",
    "choose_recurrent",
    "choose_rows",
    "context_kv",
    "domino_rollout",
    "emitted_tokens",
    "extend_positions",
    "fits",
    "gather_slots",
    "greedy_walk",
    "grouped_conv",
    "install_batch_invariant_kernels",
    "install_linear",
    "invariant_attention",
    "murmur_hash32",
    "native_attention",
    "native_write_and_attend",
    "paged_attention",
    "pair_scores",
    "penalize",
    "penalties_of",
    "place_matters",
    "project_context",
    "recent_slots",
    "row_argmax",
    "serves",
    "top_candidates",
    "warm_up",
    "with_sink",
]


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `reference.row_argmax`."""
    if logits.is_cuda:
        from sglang_dflash.ops import triton_acceptance

        return triton_acceptance.row_argmax(logits)
    if serves(logits.device, logits.dtype):
        ids: torch.Tensor = torch.ops.sglang_dflash.row_argmax(logits)
        return ids
    return reference.row_argmax(logits)


def accept_chain(target_ids: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """See `reference.accept_chain`."""
    if target_ids.is_cuda:
        from sglang_dflash.ops import triton_acceptance

        return triton_acceptance.accept_chain(target_ids, ids)
    return reference.accept_chain(target_ids, ids)


def warm_up(
    width: int, compared: set[tuple[int, torch.dtype]], vocab_size: int, req_to_token: torch.Tensor, mask_token_id: int
) -> None:
    """See `triton_warm_up.warm_up`; on a CPU there is nothing to compile."""
    if req_to_token.is_cuda:
        from sglang_dflash.ops import triton_warm_up

        triton_warm_up.warm_up(width, compared, vocab_size, req_to_token, mask_token_id)

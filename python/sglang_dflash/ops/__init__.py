"""Public ops; the only place where a body is chosen. `reference.py` is the specification of each.

Ops that have a Triton body take it where their tensors are on CUDA, and torch elsewhere; Triton is imported by the
first such call, so that a machine without a GPU never loads it.
"""

from __future__ import annotations

import torch

from sglang_dflash.ops import reference
from sglang_dflash.ops.attention import KVScratch, PagedRows, paged_attention
from sglang_dflash.ops.batch_invariant import install_batch_invariant_kernels, place_matters
from sglang_dflash.ops.kv_buffers import KVBuffers, fits
from sglang_dflash.ops.murmur import murmur_hash32
from sglang_dflash.ops.penalties import Emitted, EmittedTokens, PenaltyParams, penalize, penalties_of
from sglang_dflash.ops.reference import (
    GreedyAcceptance,
    context_kv,
    extend_positions,
    gather_slots,
    project_context,
    recent_slots,
)
from sglang_dflash.ops.tiled_attention import invariant_attention

__all__ = [
    "Emitted",
    "EmittedTokens",
    "GreedyAcceptance",
    "KVBuffers",
    "KVScratch",
    "PagedRows",
    "PenaltyParams",
    "accept_chain",
    "accept_greedy",
    "block_layout",
    "context_kv",
    "extend_positions",
    "fits",
    "gather_slots",
    "install_batch_invariant_kernels",
    "invariant_attention",
    "murmur_hash32",
    "paged_attention",
    "penalize",
    "penalties_of",
    "place_matters",
    "project_context",
    "recent_slots",
    "row_argmax",
    "write_context_kv",
]


def block_layout(
    bonus_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    block_size: int,
    mask_token_id: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.block_layout`."""
    arguments = (bonus_ids, prefix_lens, req_pool_indices, req_to_token, block_size, mask_token_id)
    if bonus_ids.is_cuda:
        from sglang_dflash.ops import triton_block

        return triton_block.block_layout(*arguments)
    return reference.block_layout(*arguments)


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `reference.row_argmax`."""
    if logits.is_cuda:
        from sglang_dflash.ops import triton_acceptance

        return triton_acceptance.row_argmax(logits)
    return reference.row_argmax(logits)


def accept_chain(target_ids: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """See `reference.accept_chain`."""
    if target_ids.is_cuda:
        from sglang_dflash.ops import triton_acceptance

        return triton_acceptance.accept_chain(target_ids, ids)
    return reference.accept_chain(target_ids, ids)


def accept_greedy(logits: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """See `reference.accept_greedy`."""
    if logits.is_cuda:
        from sglang_dflash.ops import triton_acceptance

        return triton_acceptance.accept_greedy(logits, ids)
    return reference.accept_greedy(logits, ids)


def write_context_kv(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    buffers: KVBuffers,
) -> None:
    """See `reference.write_context_kv`."""
    arguments = (kv, k_norm_weight, eps, positions, cos_sin, slots, buffers)
    if kv.is_cuda:
        from sglang_dflash.ops import triton_context_kv

        triton_context_kv.write_context_kv(*arguments)
    else:
        reference.write_context_kv(*arguments)

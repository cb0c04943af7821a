"""The native ops with the arguments and results of their specifications; see `kernels.choose_kernels`."""

from __future__ import annotations

import torch

from sglang_dflash.ops import native
from sglang_dflash.ops.kv_buffers import KVBuffers
from sglang_dflash.ops.reference import Drafts, GreedyAcceptance


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
    rows = (kv, k_norm_weight, eps, positions, cos_sin, slots)
    native.compiled.write_context_kv(*rows, buffers.k, buffers.v)


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `reference.row_argmax`."""
    ids: torch.Tensor = torch.ops.sglang_dflash.row_argmax.default(logits)
    return ids


def accept_greedy(logits: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """See `reference.accept_greedy`. It reads no logits after a request's first rejected draft."""
    return GreedyAcceptance(*torch.ops.sglang_dflash.accept_greedy(logits, ids))


def experts(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, activation: str
) -> torch.Tensor:
    """See `mixture.experts`."""
    out: torch.Tensor = torch.ops.sglang_dflash.experts.default(x, up, down, ids, weights, activation)
    return out


def best_log_probs(logits: torch.Tensor) -> Drafts:
    """See `reference.best_log_probs`."""
    return Drafts(*native.compiled.best_log_probs(logits))

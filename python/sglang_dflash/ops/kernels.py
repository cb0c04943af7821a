"""Chooses the bodies of all ops, torch, native or Triton: once, when a caller is constructed, which then holds them.

A native or Triton body takes the arguments of its torch body and gives the same result, up to the rounding that the
tests allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang_dflash.ops import reference
from sglang_dflash.ops.penalties import EmittedTokens
from sglang_dflash.ops.reference import Drafts, GreedyAcceptance

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NATIVE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The bodies of all ops for tensors of one device and of some dtypes.

    Each field has the signature of the function of the same name in `reference`.

    Fields:
        emitted_tokens: the class that counts emitted tokens.
    """

    block_layout: Callable[..., Three]
    write_context_kv: Callable[..., None]
    row_argmax: Callable[[torch.Tensor], torch.Tensor]
    accept_chain: Callable[[torch.Tensor, torch.Tensor], GreedyAcceptance]
    accept_greedy: Callable[[torch.Tensor, torch.Tensor], GreedyAcceptance]
    best_log_probs: Callable[[torch.Tensor], Drafts]
    sample_rows: Callable[..., torch.Tensor]
    emitted_tokens: type[EmittedTokens]


TORCH_KERNELS = Kernels(
    block_layout=reference.block_layout,
    write_context_kv=reference.write_context_kv,
    row_argmax=reference.row_argmax,
    accept_chain=reference.accept_chain,
    accept_greedy=reference.accept_greedy,
    best_log_probs=reference.best_log_probs,
    sample_rows=reference.sample_rows,
    emitted_tokens=EmittedTokens,
)


def choose_kernels(device: torch.device | str, *dtypes: torch.dtype) -> Kernels:
    """The bodies for tensors of all these dtypes on this device.

    The first call for CUDA imports Triton, so without a GPU nothing loads it. On a CPU two ops over the vocabulary are
    native where `sglang_cpu` has loaded its library, which registers them with torch; they take float32 and bfloat16.
    The other ops are over the rows of a step, and torch takes microseconds for them.

    Args:
        dtypes: of everything that the caller hands over: also of a KV cache.
    """
    if torch.device(device).type == "cuda":
        return _cuda_kernels()
    if hasattr(torch.ops.sglang_cpu, "best_log_probs") and all(dtype in NATIVE_DTYPES for dtype in dtypes):
        return _NATIVE_KERNELS
    return TORCH_KERNELS


def _row_argmax(logits: torch.Tensor) -> torch.Tensor:
    ids: torch.Tensor = torch.ops.sglang_cpu.row_argmax(logits)
    return ids


def _accept_greedy(logits: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    return reference.accept_chain(_row_argmax(logits.flatten(0, 1)).view(ids.shape), ids)


def _best_log_probs(logits: torch.Tensor) -> Drafts:
    return Drafts(*torch.ops.sglang_cpu.best_log_probs(logits))


_NATIVE_KERNELS = replace(
    TORCH_KERNELS, row_argmax=_row_argmax, accept_greedy=_accept_greedy, best_log_probs=_best_log_probs
)


def _cuda_kernels() -> Kernels:
    """Not cached: tests put references in the place of Triton's functions."""
    from sglang_dflash.ops import (
        triton_acceptance,
        triton_block,
        triton_context_kv,
        triton_penalties,
        triton_sampling,
    )

    return replace(
        TORCH_KERNELS,
        block_layout=triton_block.block_layout,
        write_context_kv=triton_context_kv.write_context_kv,
        row_argmax=triton_acceptance.row_argmax,
        accept_chain=triton_acceptance.accept_chain,
        accept_greedy=triton_acceptance.accept_greedy,
        sample_rows=triton_sampling.sample_rows,
        emitted_tokens=triton_penalties.TritonEmittedTokens,
    )


def warm_up(
    width: int,
    compared: set[tuple[int, torch.dtype]],
    vocab_size: int,
    req_to_token: torch.Tensor,
    mask_token_id: int,
    draws: bool,
) -> None:
    """See `triton_warm_up.warm_up`; on a CPU there is nothing to compile."""
    if req_to_token.is_cuda:
        from sglang_dflash.ops import triton_warm_up

        triton_warm_up.warm_up(width, compared, vocab_size, req_to_token, mask_token_id, draws)

"""Chooses the bodies of all ops, torch, native or Triton: once, when a caller is constructed, which then holds them.

A native or Triton body takes the arguments of its torch body and gives the same result, up to the rounding that the
tests allow. A request's result depends neither on the number of threads nor on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from sglang_dflash.ops import mixture, native, native_bodies, recurrent, reference
from sglang_dflash.ops import recurrent_reference as states
from sglang_dflash.ops.attention_bodies import NATIVE_ATTENTION, TORCH_ATTENTION, Attention
from sglang_dflash.ops.penalties import EmittedTokens
from sglang_dflash.ops.reference import Drafts, GreedyAcceptance

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The bodies of all ops for tensors of one device and of some dtypes.

    Each field has the signature of the function of the same name in `reference`, `recurrent_reference` (layers with
    state) or `mixture` (experts).

    Fields:
        native: whether they are the ops of `csrc/`.
        emitted_tokens: the class that counts emitted tokens.
    """

    native: bool
    attention: Attention
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    norm_rope_: Callable[[torch.Tensor, torch.Tensor | None, float, torch.Tensor, torch.Tensor], None]
    block_layout: Callable[..., Three]
    write_context_kv: Callable[..., None]
    row_argmax: Callable[[torch.Tensor], torch.Tensor]
    accept_chain: Callable[[torch.Tensor, torch.Tensor], GreedyAcceptance]
    accept_greedy: Callable[[torch.Tensor, torch.Tensor], GreedyAcceptance]
    best_log_probs: Callable[[torch.Tensor], Drafts]
    experts: Callable[..., torch.Tensor]
    causal_conv: Callable[..., torch.Tensor]
    delta_gates: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    delta_rule: Callable[..., torch.Tensor]
    selective_scan: Callable[..., torch.Tensor]
    gated_rms_norm: Callable[..., torch.Tensor]
    emitted_tokens: type[EmittedTokens]


TORCH_KERNELS = Kernels(
    native=False,
    attention=TORCH_ATTENTION,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    norm_rope_=reference.norm_rope_,
    block_layout=reference.block_layout,
    write_context_kv=reference.write_context_kv,
    row_argmax=reference.row_argmax,
    accept_chain=reference.accept_chain,
    accept_greedy=reference.accept_greedy,
    best_log_probs=reference.best_log_probs,
    experts=mixture.experts,
    causal_conv=recurrent.causal_conv,
    delta_gates=states.delta_gates,
    delta_rule=recurrent.delta_rule,
    selective_scan=recurrent.selective_scan,
    gated_rms_norm=states.gated_rms_norm,
    emitted_tokens=EmittedTokens,
)


def choose_kernels(device: torch.device | str, *dtypes: torch.dtype) -> Kernels:
    """The bodies for tensors of all these dtypes on this device.

    Native bodies take float32 and bfloat16 on a CPU; another dtype gets torch's. The first call for CUDA imports
    Triton, so without a GPU nothing loads it.

    Args:
        dtypes: of everything that the caller hands over: also of a KV cache or of states.
    """
    if torch.device(device).type == "cuda":
        return _cuda_kernels()
    if native.serves(device, *dtypes):
        return _native_kernels()
    return TORCH_KERNELS


@cache
def _native_kernels() -> Kernels:
    compiled = torch.ops.sglang_dflash
    return Kernels(
        native=True,
        attention=NATIVE_ATTENTION,
        rms_norm=compiled.rms_norm,
        add_rms_norm=compiled.add_rms_norm,
        norm_rope_=compiled.norm_rope_,
        block_layout=native.compiled.block_layout,
        write_context_kv=native_bodies.write_context_kv,
        row_argmax=native_bodies.row_argmax,
        accept_chain=reference.accept_chain,
        accept_greedy=native_bodies.accept_greedy,
        best_log_probs=native_bodies.best_log_probs,
        experts=native_bodies.experts,
        causal_conv=recurrent.native_causal_conv,
        delta_gates=compiled.delta_gates,
        delta_rule=recurrent.native_delta_rule,
        selective_scan=recurrent.native_selective_scan,
        gated_rms_norm=compiled.gated_rms_norm,
        emitted_tokens=EmittedTokens,
    )


def _cuda_kernels() -> Kernels:
    """Not cached: tests put references in the place of Triton's functions."""
    from sglang_dflash.ops import triton_acceptance, triton_block, triton_context_kv, triton_penalties

    return replace(
        TORCH_KERNELS,
        block_layout=triton_block.block_layout,
        write_context_kv=triton_context_kv.write_context_kv,
        row_argmax=triton_acceptance.row_argmax,
        accept_chain=triton_acceptance.accept_chain,
        accept_greedy=triton_acceptance.accept_greedy,
        emitted_tokens=triton_penalties.TritonEmittedTokens,
    )


def warm_up(
    width: int, compared: set[tuple[int, torch.dtype]], vocab_size: int, req_to_token: torch.Tensor, mask_token_id: int
) -> None:
    """See `triton_warm_up.warm_up`; on a CPU there is nothing to compile."""
    if req_to_token.is_cuda:
        from sglang_dflash.ops import triton_warm_up

        triton_warm_up.warm_up(width, compared, vocab_size, req_to_token, mask_token_id)


def bodies(device: torch.device | str = "cpu") -> str:
    """The ops in use on this device, for the start-up log line."""
    return f"native ops: {native.described()}" if torch.device(device).type == "cpu" else "ops: triton and torch"

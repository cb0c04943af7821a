"""Chooses the bodies of all ops, torch, native or Triton: once, when a caller is constructed, which then holds them.

A native or Triton body takes the arguments of its torch body and gives the same result, up to the rounding that the
tests allow. A request's result depends neither on the number of threads nor on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from sglang_dflash.ops import (
    draft_offers,
    fixed_trees,
    mixture,
    native,
    native_bodies,
    planning,
    platt_scaling,
    recurrent,
    reference,
    tree,
)
from sglang_dflash.ops import recurrent_reference as states
from sglang_dflash.ops.attention_bodies import NATIVE_ATTENTION, TORCH_ATTENTION, Attention
from sglang_dflash.ops.draft_offers import BestWidth
from sglang_dflash.ops.penalties import EmittedTokens
from sglang_dflash.ops.planning import VerifiedRows
from sglang_dflash.ops.reference import GreedyAcceptance
from sglang_dflash.ops.tree import PlannedRows, Proposal, TreeAcceptance, Trees

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PlanKernels:
    """What a plan of rows takes, on the host's CPU. Specified by the functions of the same names in `tree`,
    `platt_scaling`, `planning` and `draft_offers`. Whole numbers come as lists or tuples."""

    best_first: Callable[..., Trees]
    take_rows: Callable[..., PlannedRows]
    plan_rows: Callable[..., PlannedRows]
    platt: Callable[..., torch.Tensor]
    learn_steps: Callable[..., VerifiedRows]
    best_width: Callable[..., BestWidth]
    lay_out_trees: Callable[..., Three]
    exchange_slots: Callable[..., None]
    committed_rows: Callable[..., Four]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The bodies of all ops for tensors of one device and of some dtypes.

    Each field has the signature of the function of the same name in `reference`, `recurrent_reference` (layers with
    state), `mixture` (experts) or `tree`. On CUDA, trees have equally many rows, as in `fixed_trees`.

    Fields:
        native: whether they are the ops of `csrc/`.
        emitted_tokens: the class that counts emitted tokens.
        plans: independent of the dtypes.
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
    top_log_probs: Callable[[torch.Tensor, int], Proposal]
    accept_tree: Callable[..., TreeAcceptance]
    accept_tree_greedy: Callable[..., TreeAcceptance]
    experts: Callable[..., torch.Tensor]
    causal_conv: Callable[..., torch.Tensor]
    delta_gates: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    delta_rule: Callable[..., torch.Tensor]
    selective_scan: Callable[..., torch.Tensor]
    gated_rms_norm: Callable[..., torch.Tensor]
    emitted_tokens: type[EmittedTokens]
    plans: PlanKernels


TORCH_PLANS = PlanKernels(
    best_first=tree.best_first,
    take_rows=tree.take_rows,
    plan_rows=planning.plan_rows,
    platt=platt_scaling.platt,
    learn_steps=planning.learn_steps,
    best_width=draft_offers.best_width,
    lay_out_trees=tree.lay_out_trees,
    exchange_slots=tree.exchange_slots,
    committed_rows=tree.committed_rows,
)

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
    top_log_probs=tree.top_log_probs,
    accept_tree=tree.accept_tree,
    accept_tree_greedy=tree.accept_tree_greedy,
    experts=mixture.experts,
    causal_conv=recurrent.causal_conv,
    delta_gates=states.delta_gates,
    delta_rule=recurrent.delta_rule,
    selective_scan=recurrent.selective_scan,
    gated_rms_norm=states.gated_rms_norm,
    emitted_tokens=EmittedTokens,
    plans=TORCH_PLANS,
)


def choose_kernels(device: torch.device | str, *dtypes: torch.dtype) -> Kernels:
    """The bodies for tensors of all these dtypes on this device.

    Native bodies take float32 and bfloat16 on a CPU; another dtype gets torch's, a plan's ops excepted. The first call
    for CUDA imports Triton, so without a GPU nothing loads it.

    Args:
        dtypes: of everything that the caller hands over: also of a KV cache or of states.
    """
    if torch.device(device).type == "cuda":
        return _cuda_kernels()
    if native.serves(device, *dtypes):
        return _native_kernels()
    return _torch_kernels_with_native_plans() if native.serves("cpu") else TORCH_KERNELS


@cache
def _native_plans() -> PlanKernels:
    return PlanKernels(
        best_first=native_bodies.best_first,
        take_rows=native_bodies.take_rows,
        plan_rows=native_bodies.plan_rows,
        platt=native_bodies.platt,
        learn_steps=native_bodies.learn_steps,
        best_width=native_bodies.best_width,
        lay_out_trees=native_bodies.lay_out_trees,
        exchange_slots=native.compiled.exchange_slots,
        committed_rows=native.compiled.committed_rows,
    )


@cache
def _torch_kernels_with_native_plans() -> Kernels:
    return replace(TORCH_KERNELS, plans=_native_plans())


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
        top_log_probs=native_bodies.top_log_probs,
        accept_tree=native_bodies.accept_tree,
        accept_tree_greedy=native_bodies.accept_tree_greedy,
        experts=native_bodies.experts,
        causal_conv=recurrent.native_causal_conv,
        delta_gates=compiled.delta_gates,
        delta_rule=recurrent.native_delta_rule,
        selective_scan=recurrent.native_selective_scan,
        gated_rms_norm=compiled.gated_rms_norm,
        emitted_tokens=EmittedTokens,
        plans=_native_plans(),
    )


def _cuda_kernels() -> Kernels:
    """Not cached: tests put references in the place of Triton's functions."""
    from sglang_dflash.ops import triton_acceptance, triton_block, triton_context_kv, triton_penalties

    def accept_tree_greedy(
        logits: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
    ) -> TreeAcceptance:
        target_ids = triton_acceptance.row_argmax(logits[: len(ids)])
        return fixed_trees.accept_tree(target_ids, ids, parents, row_starts, length)

    return replace(
        TORCH_KERNELS,
        block_layout=triton_block.block_layout,
        write_context_kv=triton_context_kv.write_context_kv,
        row_argmax=triton_acceptance.row_argmax,
        accept_chain=triton_acceptance.accept_chain,
        accept_greedy=triton_acceptance.accept_greedy,
        top_log_probs=fixed_trees.top_log_probs,
        accept_tree=fixed_trees.accept_tree,
        accept_tree_greedy=accept_tree_greedy,
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

"""The public ops. `reference.py` specifies them; `block_conv.py`, `selector.py`, `domino.py` those of draft heads;
`mixture.py` that of a mixture of experts, `tree.py` those over trees of rows, `platt_scaling.py` and `draft_offers.py`
those of a plan. On CUDA, the ops over trees are those of `fixed_trees.py`, for trees of equally many rows.

An op may have torch, native and Triton bodies. `row_argmax`, `accept_chain`, `experts` and the ops over trees choose
theirs here at every call, by the tensors' device and dtype. The others are chosen in `bodies.py`, once, when a caller
is constructed. The first choice of a Triton body imports Triton, so without a GPU nothing loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_dflash.ops import draft_offers, fixed_trees, mixture, platt_scaling, reference, tree
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
from sglang_dflash.ops.draft_offers import BestWidth, Offers, StepCosts
from sglang_dflash.ops.fixed_trees import (
    DraftedTrees,
    FinalSlots,
    attention_mask,
    draft_trees,
    final_slots,
    links,
    most_rows,
)
from sglang_dflash.ops.fixed_trees import lay_out as lay_out_fixed_trees
from sglang_dflash.ops.kv_buffers import KVBuffers, fits
from sglang_dflash.ops.murmur import murmur_hash32
from sglang_dflash.ops.native import install_linear, serves
from sglang_dflash.ops.penalties import (
    Emitted,
    EmittedTokens,
    PenaltyParams,
    penalize,
    penalize_trees,
    penalties_of,
)
from sglang_dflash.ops.platt_scaling import ChosenRows, PlattTuning
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
from sglang_dflash.ops.tree import PlannedRows, Proposal, TreeAcceptance, Trees, accept_anchors

__all__ = [
    "INVARIANT_ATTENTION",
    "TORCH_ATTENTION",
    "TORCH_RECURRENT",
    "TORCH_ROWS",
    "Attention",
    "BestWidth",
    "Candidates",
    "ChosenRows",
    "DominoWeights",
    "DraftedTrees",
    "Emitted",
    "EmittedTokens",
    "FinalSlots",
    "GreedyAcceptance",
    "KVBuffers",
    "KVScratch",
    "Offers",
    "PagedRows",
    "PagedTable",
    "PenaltyParams",
    "PlannedRows",
    "PlattTuning",
    "Proposal",
    "RecurrentOps",
    "RowOps",
    "StateRows",
    "StepCosts",
    "TreeAcceptance",
    "Trees",
    "accept_anchors",
    "accept_chain",
    "accept_tree",
    "accept_tree_greedy",
    "attention_mask",
    "best_first",
    "best_width",
    "bodies",
    "by_id",
    "candidate_logits",
    "choose_attention",
    "choose_recurrent",
    "choose_rows",
    "committed_rows",
    "context_kv",
    "domino_rollout",
    "draft_trees",
    "emitted_tokens",
    "exchange_slots",
    "experts",
    "extend_positions",
    "final_slots",
    "fits",
    "gather_slots",
    "greedy_walk",
    "grouped_conv",
    "install_batch_invariant_kernels",
    "install_linear",
    "invariant_attention",
    "keep_offers",
    "lay_out_fixed_trees",
    "lay_out_trees",
    "links",
    "most_rows",
    "murmur_hash32",
    "native_attention",
    "native_write_and_attend",
    "paged_attention",
    "pair_scores",
    "penalize",
    "penalize_trees",
    "penalties_of",
    "place_matters",
    "plan_rows",
    "platt",
    "platt_step",
    "project_context",
    "recent_slots",
    "row_argmax",
    "serves",
    "take_rows",
    "top_candidates",
    "top_log_probs",
    "warm_up",
    "with_sink",
]


def row_argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `reference.row_argmax`."""
    if logits.is_cuda:
        from sglang_dflash.ops import triton_acceptance

        return triton_acceptance.row_argmax(logits)
    if serves(logits.device, logits.dtype):
        ids: torch.Tensor = torch.ops.sglang_dflash.row_argmax.default(logits)
        return ids
    return reference.row_argmax(logits)


def accept_chain(target_ids: torch.Tensor, ids: torch.Tensor) -> GreedyAcceptance:
    """See `reference.accept_chain`."""
    if target_ids.is_cuda:
        from sglang_dflash.ops import triton_acceptance

        return triton_acceptance.accept_chain(target_ids, ids)
    return reference.accept_chain(target_ids, ids)


def experts(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, activation: str
) -> torch.Tensor:
    """See `mixture.experts`."""
    body = torch.ops.sglang_dflash.experts.default if serves(x.device, x.dtype) else mixture.experts
    out: torch.Tensor = body(x, up, down, ids, weights, activation)
    return out


def top_log_probs(logits: torch.Tensor, count: int) -> Proposal:
    """See `tree.top_log_probs`."""
    if logits.is_cuda:
        return fixed_trees.top_log_probs(logits, count)
    if serves(logits.device, logits.dtype):
        return Proposal(*torch.ops.sglang_dflash.top_log_probs.default(logits, count))
    return tree.top_log_probs(logits, count)


def best_first(chances: torch.Tensor, rows: int) -> Trees:
    """See `tree.best_first`."""
    if serves("cpu"):
        return Trees(*torch.ops.sglang_dflash.best_first.default(chances, rows))
    return tree.best_first(chances, rows)


def accept_tree(
    target_ids: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """See `tree.accept_tree`."""
    if target_ids.is_cuda:
        return fixed_trees.accept_tree(target_ids, ids, parents, row_starts, length)
    if serves("cpu"):
        return TreeAcceptance(
            *torch.ops.sglang_dflash.accept_tree.default(target_ids, ids, parents, row_starts, length)
        )
    return tree.accept_tree(target_ids, ids, parents, row_starts, length)


def accept_tree_greedy(
    logits: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """See `tree.accept_tree_greedy`."""
    if logits.is_cuda:
        return fixed_trees.accept_tree(row_argmax(logits[: len(ids)]), ids, parents, row_starts, length)
    if serves(logits.device, logits.dtype):
        return TreeAcceptance(
            *torch.ops.sglang_dflash.accept_tree_greedy.default(logits, ids, parents, row_starts, length)
        )
    return tree.accept_tree_greedy(logits, ids, parents, row_starts, length)


def platt(
    log_probs: torch.Tensor, shared: torch.Tensor, own: torch.Tensor, places: Sequence[int], max_logit: float
) -> torch.Tensor:
    """See `platt_scaling.platt`."""
    body = torch.ops.sglang_dflash.platt.default if serves("cpu") else platt_scaling.platt
    chances: torch.Tensor = body(log_probs, shared, own, places, max_logit)
    return chances


def platt_step(
    shared: torch.Tensor,
    own: torch.Tensor,
    places: Sequence[int],
    drafted: Sequence[int],
    rows: PlannedRows,
    path: torch.Tensor,
    log_probs: torch.Tensor,
    tuning: PlattTuning,
) -> None:
    """See `platt_scaling.platt_step`."""
    if not serves("cpu"):
        return platt_scaling.platt_step(shared, own, places, drafted, rows, path, log_probs, tuning)
    fields = rows.row_starts, rows.parents, rows.depths, rows.ranks
    torch.ops.sglang_dflash.platt_step.default(shared, own, places, drafted, *fields, path, log_probs, tuning)


def take_rows(trees: Trees, drafted: Sequence[int], lens: Sequence[int], batch: int) -> PlannedRows:
    """See `tree.take_rows`."""
    if not serves("cpu"):
        return tree.take_rows(trees, drafted, lens, batch)
    return _planned(torch.ops.sglang_dflash.take_rows.default(*trees[:3], drafted, lens, batch), drafted, lens, batch)


def _planned(taken: tuple[Any, ...], drafted: Sequence[int], lens: Sequence[int], batch: int) -> PlannedRows:
    """taken: what the native op returns."""
    parents, depths, ranks, requests, row_starts, mask, length = taken
    row_lens = [1] * batch
    for request, count in zip(drafted, lens, strict=True):
        row_lens[request] = count
    chains = mask.numel() == 0
    shape = (row_lens, None if chains else mask, length, max(row_lens, default=1))
    return PlannedRows(parents, depths, ranks, requests, row_starts, *shape)


def plan_rows(
    log_probs: torch.Tensor,
    shared: torch.Tensor,
    own: torch.Tensor,
    places: Sequence[int],
    max_logit: float,
    max_rows: int,
    least: float,
    drafted: Sequence[int],
    batch: int,
) -> ChosenRows:
    """See `platt_scaling.plan_rows`. One op, because the code of each op has to come into the processor's caches."""
    arguments = log_probs, shared, own, places, max_logit, max_rows, least, drafted, batch
    if not serves("cpu"):
        return platt_scaling.plan_rows(*arguments)
    chances, *fields = torch.ops.sglang_dflash.plan_rows.default(*arguments)
    rows = _planned(fields[4:11], drafted, fields[11], batch)
    return ChosenRows(chances, Trees(*fields[:4]), rows, *fields[12:])


def keep_offers(offers: Offers, places: Sequence[int], chances: torch.Tensor, trees: Trees, deep_weight: float) -> None:
    """See `draft_offers.keep_offers`."""
    if not serves("cpu"):
        return draft_offers.keep_offers(offers, places, chances, trees, deep_weight)
    step = places, chances, trees.reaches, trees.depths, deep_weight
    torch.ops.sglang_dflash.keep_offers.default(*offers, *step)


def best_width(
    offers: Offers, places: Sequence[int], others: Sequence[int], prior_steps: float, costs: StepCosts, price: float
) -> BestWidth:
    """See `draft_offers.best_width`."""
    if not serves("cpu"):
        return draft_offers.best_width(offers, places, others, prior_steps, costs, price)
    found = torch.ops.sglang_dflash.best_width.default(*offers, places, others, prior_steps, costs, price)
    return BestWidth(*found)


def lay_out_trees(
    rows: PlannedRows,
    drafted: Sequence[int],
    candidate_ids: torch.Tensor,
    bonus_ids: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tree.lay_out_trees`."""
    requests = (bonus_ids, prefix_lens, req_pool_indices, req_to_token)
    if not serves("cpu"):
        return tree.lay_out_trees(rows, drafted, candidate_ids, *requests)
    laid = torch.ops.sglang_dflash.lay_out_trees.default(*rows[1:5], drafted, candidate_ids, *requests)
    ids, positions, slots = laid
    return ids, positions, slots


def exchange_slots(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    path: torch.Tensor,
    commit_lens: torch.Tensor,
    row_starts: torch.Tensor,
) -> None:
    """See `tree.exchange_slots`."""
    body = torch.ops.sglang_dflash.exchange_slots.default if serves("cpu") else tree.exchange_slots
    body(req_to_token, req_pool_indices, prefix_lens, path, commit_lens, row_starts)


def committed_rows(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    path: torch.Tensor,
    commit_lens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `tree.committed_rows`."""
    body = torch.ops.sglang_dflash.committed_rows.default if serves("cpu") else tree.committed_rows
    rows, positions, slots = body(req_to_token, req_pool_indices, prefix_lens, path, commit_lens)
    return rows, positions, slots


def warm_up(
    width: int, compared: set[tuple[int, torch.dtype]], vocab_size: int, req_to_token: torch.Tensor, mask_token_id: int
) -> None:
    """See `triton_warm_up.warm_up`; on a CPU there is nothing to compile."""
    if req_to_token.is_cuda:
        from sglang_dflash.ops import triton_warm_up

        triton_warm_up.warm_up(width, compared, vocab_size, req_to_token, mask_token_id)

"""The native ops with the arguments and results of their specifications; see `kernels.choose_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from sglang_dflash.ops.draft_offers import BestWidth, OfferedStep, Offers, StepCosts
from sglang_dflash.ops.kv_buffers import KVBuffers
from sglang_dflash.ops.platt_scaling import ChosenRows, Lesson, PlattTuning
from sglang_dflash.ops.reference import GreedyAcceptance
from sglang_dflash.ops.tree import PlannedRows, Proposal, TreeAcceptance, Trees


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
    torch.ops.sglang_dflash.write_context_kv(*rows, buffers.k, buffers.v)


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


def top_log_probs(logits: torch.Tensor, count: int) -> Proposal:
    """See `tree.top_log_probs`."""
    return Proposal(*torch.ops.sglang_dflash.top_log_probs.default(logits, count))


def accept_tree(
    target_ids: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """See `tree.accept_tree`."""
    return TreeAcceptance(*torch.ops.sglang_dflash.accept_tree.default(target_ids, ids, parents, row_starts, length))


def accept_tree_greedy(
    logits: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """See `tree.accept_tree_greedy`."""
    return TreeAcceptance(*torch.ops.sglang_dflash.accept_tree_greedy.default(logits, ids, parents, row_starts, length))


def best_first(chances: torch.Tensor, rows: int) -> Trees:
    """See `tree.best_first`."""
    return Trees(*torch.ops.sglang_dflash.best_first.default(chances, rows))


def platt(
    log_probs: torch.Tensor, shared: torch.Tensor, own: torch.Tensor, places: Sequence[int], max_logit: float
) -> torch.Tensor:
    """See `platt_scaling.platt`."""
    chances: torch.Tensor = torch.ops.sglang_dflash.platt.default(log_probs, shared, own, places, max_logit)
    return chances


def platt_steps(shared: torch.Tensor, own: torch.Tensor, lessons: Sequence[Lesson], tuning: PlattTuning) -> None:
    """See `platt_scaling.platt_steps`."""
    if not lessons:
        return
    places, drafted, rows, paths, log_probs = zip(*lessons, strict=True)
    parents, depths, ranks, _, row_starts, *_ = zip(*rows, strict=True)
    requests = list(chain.from_iterable(places)), list(chain.from_iterable(drafted))
    fields = row_starts, parents, depths, ranks, paths, log_probs
    torch.ops.sglang_dflash.platt_steps.default(shared, own, *requests, *fields, tuning)


def take_rows(trees: Trees, drafted: Sequence[int], lens: Sequence[int], batch: int) -> PlannedRows:
    """See `tree.take_rows`."""
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
    chances, *fields = torch.ops.sglang_dflash.plan_rows.default(
        log_probs, shared, own, places, max_logit, max_rows, least, drafted, batch
    )
    rows = _planned(fields[4:11], drafted, fields[11], batch)
    return ChosenRows(chances, Trees(*fields[:4]), rows, *fields[12:])


def keep_offers(offers: Offers, steps: Sequence[OfferedStep], deep_weight: float, own_share: float) -> None:
    """See `draft_offers.keep_offers`."""
    if not steps:
        return
    places, chances, trees = zip(*steps, strict=True)
    _, depths, _, reaches = zip(*trees, strict=True)
    all_places = list(chain.from_iterable(places))
    torch.ops.sglang_dflash.keep_offers.default(*offers, all_places, chances, reaches, depths, deep_weight, own_share)


def best_width(
    offers: Offers, places: Sequence[int], others: Sequence[int], prior_steps: float, costs: StepCosts, price: float
) -> BestWidth:
    """See `draft_offers.best_width`."""
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
    laid = torch.ops.sglang_dflash.lay_out_trees.default(*rows[1:5], drafted, candidate_ids, *requests)
    ids, positions, slots = laid
    return ids, positions, slots

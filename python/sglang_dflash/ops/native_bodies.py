"""The native ops with the arguments and results of their specifications; see `kernels.choose_kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from sglang_dflash.ops import native
from sglang_dflash.ops.draft_offers import BestWidth, Offers, StepCosts
from sglang_dflash.ops.kv_buffers import KVBuffers
from sglang_dflash.ops.planning import PlanTables, VerifiedRows
from sglang_dflash.ops.platt_scaling import PlattTuning
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


def top_log_probs(logits: torch.Tensor, count: int) -> Proposal:
    """See `tree.top_log_probs`."""
    return Proposal(*native.compiled.top_log_probs(logits, count))


def accept_tree(
    target_ids: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """See `tree.accept_tree`."""
    return TreeAcceptance(*native.compiled.accept_tree(target_ids, ids, parents, row_starts, length))


def accept_tree_greedy(
    logits: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, row_starts: torch.Tensor, length: int
) -> TreeAcceptance:
    """See `tree.accept_tree_greedy`."""
    return TreeAcceptance(*native.compiled.accept_tree_greedy(logits, ids, parents, row_starts, length))


def best_first(chances: torch.Tensor, rows: int) -> Trees:
    """See `tree.best_first`."""
    return Trees(*native.compiled.best_first(chances, rows))


def platt(
    log_probs: torch.Tensor, shared: torch.Tensor, own: torch.Tensor, places: Sequence[int], max_logit: float
) -> torch.Tensor:
    """See `platt_scaling.platt`."""
    chances: torch.Tensor = native.compiled.platt(log_probs, shared, own, places, max_logit)
    return chances


def take_rows(
    trees: Trees,
    drafted: Sequence[int],
    lens: Sequence[int],
    batch: int,
    copied: Sequence[int] = (),
    copied_lens: Sequence[int] = (),
) -> PlannedRows:
    """See `tree.take_rows`."""
    arguments = (*trees[:3], drafted, lens, batch, copied, copied_lens)
    return PlannedRows(*native.compiled.take_rows(*arguments))


def plan_rows(
    log_probs: torch.Tensor,
    tables: PlanTables,
    first_block: int,
    places: Sequence[int],
    max_logit: float,
    least: float,
    drafted: Sequence[int],
    batch: int,
    copied: Sequence[int] = (),
    copied_lens: Sequence[int] = (),
) -> PlannedRows:
    """See `planning.plan_rows`. One op, because the code of each op has to come into the processor's caches."""
    shared, own, *_, blocks = tables
    rows = (drafted, batch, copied, copied_lens)
    return PlannedRows(
        *native.compiled.plan_rows(log_probs, shared, own, blocks, first_block, places, max_logit, least, *rows)
    )


def learn_steps(
    tables: PlanTables,
    places: Sequence[Sequence[int]],
    paths: Sequence[torch.Tensor],
    tuning: PlattTuning,
    deep_weight: float,
    own_share: float,
    new: Sequence[int] = (),
) -> VerifiedRows:
    """See `planning.learn_steps`."""
    steps = list(chain.from_iterable(places)), list(map(len, places)), paths
    values = (*tuning, deep_weight, own_share)
    learned = native.compiled.learn_steps(*tables, *steps, values, new)
    return VerifiedRows(*learned)


def best_width(
    offers: Offers, places: Sequence[int], others: Sequence[int], prior_steps: float, costs: StepCosts, price: float
) -> BestWidth:
    """See `draft_offers.best_width`."""
    found = native.compiled.best_width(offers, places, others, prior_steps, costs, price)
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
    laid = native.compiled.lay_out_trees(*rows[1:5], drafted, candidate_ids, *requests)
    ids, positions, slots = laid
    return ids, positions, slots

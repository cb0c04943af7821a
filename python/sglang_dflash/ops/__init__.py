"""The public ops. `reference.py` specifies them; `block_conv.py`, `selector.py`, `domino.py` those of draft heads;
`mixture.py` that of a mixture of experts, `tree.py` those over trees of rows, `planning.py`, `platt_scaling.py` and
`draft_offers.py` those of a plan. On CUDA, the ops over trees are those of `fixed_trees.py`, for trees of equally many
rows.

An op may have torch, native and Triton bodies. `choose_kernels` chooses them for a device and dtypes; a caller asks it
once, when it is constructed, and holds the `Kernels`.
"""

from __future__ import annotations

from sglang_dflash.ops.attention import KVScratch, PagedRows, paged_attention, with_sink
from sglang_dflash.ops.attention_bodies import (
    TORCH_ATTENTION,
    Attention,
    PagedTable,
    native_attention,
    native_write_and_attend,
)
from sglang_dflash.ops.batch_invariant import install_batch_invariant_kernels
from sglang_dflash.ops.block_conv import grouped_conv
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
from sglang_dflash.ops.kernels import TORCH_KERNELS, Kernels, PlanKernels, bodies, choose_kernels, warm_up
from sglang_dflash.ops.kv_buffers import KVBuffers, fits
from sglang_dflash.ops.murmur import murmur_hash32
from sglang_dflash.ops.native import DTYPES as NATIVE_DTYPES
from sglang_dflash.ops.native import install_linear, serves
from sglang_dflash.ops.packed_rows import (
    ChanceTotals,
    PackedRows,
    at_places,
    chain_reach,
    learn_chances,
    likeliest_rows,
    pack_rows,
    row_gains,
    whole_blocks,
)
from sglang_dflash.ops.penalties import (
    Emitted,
    EmittedTokens,
    PenaltyParams,
    penalize,
    penalize_trees,
    penalties_of,
)
from sglang_dflash.ops.planning import PlanTables, VerifiedRows
from sglang_dflash.ops.platt_scaling import PlattTuning
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
from sglang_dflash.ops.tree import PlannedRows, Proposal, TreeAcceptance, Trees, accept_anchors

__all__ = [
    "NATIVE_DTYPES",
    "TORCH_ATTENTION",
    "TORCH_KERNELS",
    "Attention",
    "BestWidth",
    "Candidates",
    "ChanceTotals",
    "DominoWeights",
    "DraftedTrees",
    "Emitted",
    "EmittedTokens",
    "FinalSlots",
    "GreedyAcceptance",
    "KVBuffers",
    "KVScratch",
    "Kernels",
    "Offers",
    "PackedRows",
    "PagedRows",
    "PagedTable",
    "PenaltyParams",
    "PlanKernels",
    "PlanTables",
    "PlannedRows",
    "PlattTuning",
    "Proposal",
    "StateRows",
    "StepCosts",
    "TreeAcceptance",
    "Trees",
    "VerifiedRows",
    "accept_anchors",
    "at_places",
    "attention_mask",
    "bodies",
    "by_id",
    "candidate_logits",
    "chain_reach",
    "choose_kernels",
    "context_kv",
    "domino_rollout",
    "draft_trees",
    "extend_positions",
    "final_slots",
    "fits",
    "gather_slots",
    "greedy_walk",
    "grouped_conv",
    "install_batch_invariant_kernels",
    "install_linear",
    "lay_out_fixed_trees",
    "learn_chances",
    "likeliest_rows",
    "links",
    "most_rows",
    "murmur_hash32",
    "native_attention",
    "native_write_and_attend",
    "pack_rows",
    "paged_attention",
    "pair_scores",
    "penalize",
    "penalize_trees",
    "penalties_of",
    "project_context",
    "recent_slots",
    "row_gains",
    "serves",
    "top_candidates",
    "warm_up",
    "whole_blocks",
    "with_sink",
]

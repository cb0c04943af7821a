"""The public ops. `reference.py` specifies them; `block_conv.py`, `selector.py`, `domino.py` those of draft heads;
`rows.py` those of rows that are verified, `trees.py` those of trees.

An op may have torch, native and Triton bodies. `choose_kernels` chooses them for a device and dtypes; a caller asks it
once, when it is constructed, and holds the `Kernels`.
"""

from __future__ import annotations

from sglang_dflash.ops.block_conv import grouped_conv
from sglang_dflash.ops.domino import DominoWeights, domino_rollout
from sglang_dflash.ops.kernels import TORCH_KERNELS, Kernels, choose_kernels, warm_up
from sglang_dflash.ops.kv_buffers import FP8, KVBuffers, fits
from sglang_dflash.ops.penalties import BlockRows, Emitted, EmittedTokens, PenaltyParams, penalize, penalties_of
from sglang_dflash.ops.reference import (
    MOST_SAMPLED,
    Drafts,
    Filters,
    GreedyAcceptance,
    context_kv,
    extend_positions,
    gather_slots,
    project_context,
    recent_slots,
)
from sglang_dflash.ops.rows import Rows, keep_rows, likeliest_rows, survival
from sglang_dflash.ops.selector import (
    Candidates,
    by_id,
    candidate_logits,
    greedy_walk,
    pair_scores,
    top_candidates,
)
from sglang_dflash.ops.trees import (
    TreeAcceptance,
    Trees,
    accept_tree,
    attention_mask,
    grow_trees,
    most_rows,
    seen_rows,
    top_drafts,
)

__all__ = [
    "FP8",
    "MOST_SAMPLED",
    "TORCH_KERNELS",
    "BlockRows",
    "Candidates",
    "DominoWeights",
    "Drafts",
    "Emitted",
    "EmittedTokens",
    "Filters",
    "GreedyAcceptance",
    "KVBuffers",
    "Kernels",
    "PenaltyParams",
    "Rows",
    "TreeAcceptance",
    "Trees",
    "accept_tree",
    "attention_mask",
    "by_id",
    "candidate_logits",
    "choose_kernels",
    "context_kv",
    "domino_rollout",
    "extend_positions",
    "fits",
    "gather_slots",
    "greedy_walk",
    "grouped_conv",
    "grow_trees",
    "keep_rows",
    "likeliest_rows",
    "most_rows",
    "pair_scores",
    "penalize",
    "penalties_of",
    "project_context",
    "recent_slots",
    "seen_rows",
    "survival",
    "top_candidates",
    "top_drafts",
    "warm_up",
]

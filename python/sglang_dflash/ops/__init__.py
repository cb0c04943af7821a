"""Public ops. `reference.py` is the specification of each; `bodies.py` chooses between native and torch."""

from __future__ import annotations

from sglang_dflash.ops.attention import KVScratch, PagedRows, paged_attention
from sglang_dflash.ops.batch_invariant import install_batch_invariant_kernels, place_matters
from sglang_dflash.ops.bodies import (
    INVARIANT_ATTENTION,
    TORCH_ROWS,
    Attention,
    PagedTable,
    RowOps,
    bodies,
    choose_attention,
    choose_rows,
    native_attention,
)
from sglang_dflash.ops.murmur import murmur_hash32
from sglang_dflash.ops.native import serves
from sglang_dflash.ops.penalties import Emitted, EmittedTokens, PenaltyParams, penalize, penalties_of
from sglang_dflash.ops.reference import (
    GreedyAcceptance,
    accept_chain,
    accept_greedy,
    block_layout,
    context_kv,
    extend_positions,
    gather_slots,
    recent_slots,
)
from sglang_dflash.ops.tiled_attention import invariant_attention

__all__ = [
    "INVARIANT_ATTENTION",
    "TORCH_ROWS",
    "Attention",
    "Emitted",
    "EmittedTokens",
    "GreedyAcceptance",
    "KVScratch",
    "PagedRows",
    "PagedTable",
    "PenaltyParams",
    "RowOps",
    "accept_chain",
    "accept_greedy",
    "block_layout",
    "bodies",
    "choose_attention",
    "choose_rows",
    "context_kv",
    "extend_positions",
    "gather_slots",
    "install_batch_invariant_kernels",
    "invariant_attention",
    "murmur_hash32",
    "native_attention",
    "paged_attention",
    "penalize",
    "penalties_of",
    "place_matters",
    "recent_slots",
    "serves",
]

"""Public ops; the only place where a body is chosen. `reference.py` is the specification of each."""

from __future__ import annotations

from sglang_dflash.ops.attention import KVScratch, PagedRows, paged_attention
from sglang_dflash.ops.reference import accept_greedy, block_layout, context_kv, extend_positions, gather_slots

__all__ = [
    "KVScratch",
    "PagedRows",
    "accept_greedy",
    "block_layout",
    "context_kv",
    "extend_positions",
    "gather_slots",
    "paged_attention",
]

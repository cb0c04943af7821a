"""Chooses between the torch, native and Triton bodies of the ops: once, when a caller is constructed.

A native body takes the arguments of its torch body and gives the same result, up to the rounding that the tests allow.
A request's result depends neither on the number of threads nor on the other requests of the batch. The native
`accept_greedy` reads no logits after a request's first rejected draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from sglang_dflash.ops import native, reference
from sglang_dflash.ops.attention import PagedRows, paged_attention
from sglang_dflash.ops.penalties import EmittedTokens
from sglang_dflash.ops.tiled_attention import invariant_attention


@dataclass(frozen=True, slots=True)
class PagedTable:
    """The positions of a batch's query rows and the slots of their KV, as `reference.paged_attention` takes them.

    Fields:
        req_to_token: [R, C] int32; slot of each position of each request row.
        req_pool_indices: [B] int64; the batch's rows.
        prefix_lens: [B] int64; per request, the tokens before its first query row.
        row_starts: [B + 1] int64; request b has the rows `row_starts[b] : row_starts[b + 1]` of the query tensor.
        row_mask: [B, W, W] bool, or None; see `reference.paged_attention`.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    row_starts: torch.Tensor
    row_mask: torch.Tensor | None = None

    @classmethod
    def gather(
        cls,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        prefix_lens: list[int],
        row_lens: list[int],
        row_mask: torch.Tensor | None = None,
    ) -> PagedTable:
        row_starts = torch.tensor([0, *row_lens]).cumsum(0)
        prefixes = torch.tensor(prefix_lens, dtype=torch.int64)
        return cls(req_to_token, req_pool_indices.long(), prefixes, row_starts, row_mask)

    @classmethod
    def uniform(
        cls, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor, width: int
    ) -> PagedTable:
        """`gather` for `width` rows of every request; prefix_lens: [B] int."""
        row_starts = _uniform_starts(len(prefix_lens), width)
        return cls(req_to_token, req_pool_indices.long(), prefix_lens.long(), row_starts)

    @property
    def fields(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """All but the mask, in the order of the native ops' arguments."""
        return self.req_to_token, self.req_pool_indices, self.prefix_lens, self.row_starts


@lru_cache(maxsize=64)
def _uniform_starts(batch: int, width: int) -> torch.Tensor:
    return torch.arange(batch + 1) * width


def native_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedTable,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.paged_attention` in one native call that reads the pages in place.

    A row's result depends only on its query and the keys and values it sees, bit for bit: not on threads, other
    requests or other rows.
    """
    out: torch.Tensor = torch.ops.sglang_dflash.paged_attention(
        q,
        k_cache,
        v_cache,
        *rows.fields,
        scaling,
        causal,
        -1 if window_left is None else window_left,
        rows.row_mask,
        None if sinks is None else sinks.float(),
    )
    return out


def native_write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: PagedTable,
    scaling: float,
    causal: bool,
    window_left: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.write_and_attend` in one native call."""
    out: torch.Tensor = torch.ops.sglang_dflash.write_and_attend.default(
        q,
        k,
        v,
        slots,
        k_cache,
        v_cache,
        *rows.fields,
        scaling,
        causal,
        -1 if window_left is None else window_left,
        rows.row_mask,
        None if sinks is None else sinks.float(),
    )
    return out


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention body and how to lay out the rows of a forward for it.

    Fields:
        lay_out: called once per forward with (req_to_token, req_pool_indices, prefix_lens, row_lens), the last two
            lists, and where rows form trees with `row_mask` by name. Returns `rows`.
        lay_out_uniform: the same if all requests have `width` rows: (..., prefix_lens [B] int, width).
        attend: called per layer with (q, k_cache, v_cache, rows, scaling, causal, window_left), and `sinks` by name.
        write_and_attend: `reference.write_and_attend` with `rows` in place of its tables; None if attention has no
            such body, and the caller writes and attends in two calls.
    """

    lay_out: Callable[..., Any]
    lay_out_uniform: Callable[..., Any]
    attend: Callable[..., torch.Tensor]
    write_and_attend: Callable[..., torch.Tensor] | None = None


def choose_attention(device: torch.device | str, dtype: torch.dtype, kv_dtype: torch.dtype) -> Attention:
    """The attention for queries of `dtype` over a cache of `kv_dtype`."""
    if native.serves(device, dtype, kv_dtype):
        return Attention(PagedTable.gather, PagedTable.uniform, native_attention, native_write_and_attend)
    return TORCH_ATTENTION


TORCH_ATTENTION = Attention(PagedRows.gather, PagedRows.uniform, paged_attention)
INVARIANT_ATTENTION = Attention(PagedRows.gather, PagedRows.uniform, invariant_attention)


@dataclass(frozen=True, slots=True)
class RowOps:
    """The row-wise ops; each has the signature of the function of the same name in `reference`."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    norm_rope_: Callable[[torch.Tensor, torch.Tensor | None, float, torch.Tensor, torch.Tensor], None]
    block_layout: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    write_context_kv: Callable[..., None]
    accept_greedy: Callable[[torch.Tensor, torch.Tensor], reference.GreedyAcceptance]


TORCH_ROWS = RowOps(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    norm_rope_=reference.norm_rope_,
    block_layout=reference.block_layout,
    write_context_kv=reference.write_context_kv,
    accept_greedy=reference.accept_greedy,
)


def choose_rows(device: torch.device | str, *dtypes: torch.dtype) -> RowOps:
    """The row ops for tensors of these dtypes on this device."""
    if torch.device(device).type == "cuda":
        from sglang_dflash.ops import triton_acceptance, triton_block, triton_context_kv

        return replace(
            TORCH_ROWS,
            block_layout=triton_block.block_layout,
            write_context_kv=triton_context_kv.write_context_kv,
            accept_greedy=triton_acceptance.accept_greedy,
        )
    if not native.serves(device, *dtypes):
        return TORCH_ROWS
    compiled = torch.ops.sglang_dflash
    return RowOps(
        rms_norm=compiled.rms_norm,
        add_rms_norm=compiled.add_rms_norm,
        norm_rope_=compiled.norm_rope_,
        block_layout=compiled.block_layout.default,
        write_context_kv=lambda *rest: compiled.write_context_kv(*rest[:-1], rest[-1].k, rest[-1].v),
        accept_greedy=lambda logits, ids: reference.GreedyAcceptance(*compiled.accept_greedy(logits, ids)),
    )


def emitted_tokens(vocab_size: int, device: torch.device | str) -> EmittedTokens:
    """An `EmittedTokens` with the device's bodies."""
    if torch.device(device).type == "cuda":
        from sglang_dflash.ops.triton_penalties import TritonEmittedTokens

        return TritonEmittedTokens(vocab_size, device)
    return EmittedTokens(vocab_size, device)


def bodies(device: torch.device | str = "cpu") -> str:
    """The ops in use on this device, for the start-up log line."""
    return f"native ops: {native.described()}" if torch.device(device).type == "cpu" else "ops: triton and torch"

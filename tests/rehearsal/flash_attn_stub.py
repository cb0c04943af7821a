"""Stands for `sgl_kernel.flash_attn` where no GPU is: its attention in plain torch, and stricter than the kernel.

The kernel trusts its caller: it reads past a page table that is too narrow, and takes a page id as it is. The stub
raises there, and where the kernel's own checks do (hopper/flash_api.cpp of FlashAttention 3). It raises too where an
argument is set that it does not know. Rows of the output that belong to no request are NaN.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class KernelError(RuntimeError):
    """The kernel would refuse these arguments, or read memory that is not theirs."""


def install() -> None:
    """Puts the stub where SGLang imports the kernels. For a process of its own: nothing takes it away again."""
    package = _module("sgl_kernel")
    package.flash_attn = _module("sgl_kernel.flash_attn")
    package.merge_state_v2 = merge_state_v2
    for function in (flash_attn_with_kvcache, flash_attn_varlen_func):
        setattr(package.flash_attn, function.__name__, function)
    package.flash_attn.get_scheduler_metadata = _unserved  # plain decoding only
    from sglang.kernels.ops.attention import flash_attention_v3

    flash_attention_v3._is_fa3_supported = lambda device=None: True


def _module(name: str) -> Any:
    sys.modules[name] = importlib.util.module_from_spec(ModuleSpec(name, None))
    return sys.modules[name]


def _unserved(*_: Any, **__: Any) -> None:
    raise NotImplementedError("the rehearsals know verified rows, not plain decoding")


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **unknown: Any,
) -> Any:
    """Attention of packed rows over a paged cache that already holds their own keys.

    Args:
        q: [rows, heads, D].
        k_cache, v_cache: [pages, page size, KV heads, D].
        cache_seqlens: [B] int32; keys of each request, its own rows included.
        page_table: [B, columns] int32.
        cu_seqlens_q: [B + 1] int32; first row of each request, then the end of the last.
        cu_seqlens_k_new: ignored by the kernel, which gets no new keys. Checked here all the same, as the running sum
            of `cache_seqlens`, because it is part of the metadata.
        max_seqlen_q: the most rows of a request; the kernel computes no rows behind.
        causal: the last row of a request sees all its keys, each row before it one key less.
        window_size: keys to the left and right of a row's own that it sees; -1 for all. Causal rows see none to the
            right.
        q_descale, k_descale, v_descale: [B, KV heads] float32; what 8-bit values are multiplied with.
        sinks: [heads] bfloat16; logits of one key without a value.
        num_splits, pack_gqa, sm_margin, rotary_interleaved: change no result.

    Returns:
        [rows, heads, D]; with `return_softmax_lse`, also the logarithms of the softmax's sums, [heads, rows] float32.
    """
    unset = (k, v, qv, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, rotary_seqlens, scheduler_metadata)
    _refuse(unset, attention_chunk, unknown)
    _need(page_table is not None and cache_seqlens is not None, "a paged cache and its lengths are served, no other")
    _need(cu_seqlens_q is not None and max_seqlen_q is not None, "packed rows are served, no others")
    batch, page_size = len(page_table), k_cache.shape[1]
    _check_rows(q, k_cache, v_cache, dims=4)
    _check_table(page_table, batch, len(k_cache))
    _check_ints("cache_seqlens", cache_seqlens, batch)
    _check_starts("cu_seqlens_q", cu_seqlens_q, batch, len(q))
    if cu_seqlens_k_new is not None:
        _check_ints("cu_seqlens_k_new", cu_seqlens_k_new, batch + 1)
        _need(cu_seqlens_k_new.diff().equal(cache_seqlens), "cu_seqlens_k_new is not the running sum of cache_seqlens")
    starts = cu_seqlens_q.tolist()
    keys, values = [], []
    for request, length in enumerate(cache_seqlens.tolist()):
        _need(starts[request + 1] - starts[request] <= max_seqlen_q, f"more than max_seqlen_q {max_seqlen_q} rows")
        pages = _pages(page_table[request], length, page_size, len(k_cache))
        keys.append(k_cache[pages].flatten(0, 1)[:length])
        values.append(v_cache[pages].flatten(0, 1)[:length])
    scales = (q_descale, k_descale, v_descale)
    right = 0 if causal else window_size[1]
    shape = _Shape(softmax_scale or q.shape[-1] ** -0.5, window_size[0], right, softcap, sinks)
    found, lse = _attend_packed(q, keys, values, starts, scales, shape)
    return _returned(found, lse, out, return_softmax_lse)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: None = None,
    seqused_k: None = None,
    page_table: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **unknown: Any,
) -> Any:
    """Attention of packed rows over packed keys. k, v: [keys, KV heads, D]; the rest as `flash_attn_with_kvcache`."""
    _refuse((seqused_q, seqused_k, page_table, qv), attention_chunk, unknown)
    _need(max_seqlen_q is not None and max_seqlen_k is not None, "max_seqlen_q and max_seqlen_k are required")
    batch = len(cu_seqlens_q) - 1
    _check_rows(q, k, v, dims=3)
    _check_starts("cu_seqlens_q", cu_seqlens_q, batch, len(q))
    _check_starts("cu_seqlens_k", cu_seqlens_k, batch, len(k))
    _need(int(cu_seqlens_q.diff().max()) <= max_seqlen_q, f"more than max_seqlen_q {max_seqlen_q} rows")
    _need(int(cu_seqlens_k.diff().max()) <= max_seqlen_k, f"more than max_seqlen_k {max_seqlen_k} keys")
    ends = cu_seqlens_k.tolist()
    keys, values = ([kv[a:b] for a, b in pairwise(ends)] for kv in (k, v))
    right = 0 if causal else window_size[1]
    shape = _Shape(softmax_scale or q.shape[-1] ** -0.5, window_size[0], right, softcap, sinks)
    found, lse = _attend_packed(q, keys, values, cu_seqlens_q.tolist(), (q_descale, k_descale, v_descale), shape)
    return _returned(found, lse, out, return_softmax_lse)


def merge_state_v2(
    a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys, from that over each. a, b: [rows, heads, D]; lse_a, lse_b: [rows, heads]."""
    _need(a.shape == b.shape and lse_a.shape == lse_b.shape == a.shape[:2], "states of other shapes")
    _need(lse_a.is_contiguous() and lse_b.is_contiguous(), "sums that are not contiguous")
    lse = torch.logaddexp(lse_a, lse_b)
    parts = [one.float() * torch.exp(own - lse)[..., None] for one, own in ((a, lse_a), (b, lse_b))]
    return (parts[0] + parts[1]).to(a.dtype), lse


class _Shape:
    """What a row sees, and how its scores become weights; the same for all requests."""

    def __init__(self, scale: float, left: int, right: int, softcap: float, sinks: torch.Tensor | None) -> None:
        self.scale, self.left, self.right, self.softcap, self.sinks = scale, left, right, softcap, sinks

    def visible(self, rows: int, keys: int) -> torch.Tensor:
        """[rows, keys] bool; the last row stands at the last key."""
        own = torch.arange(rows)[:, None] + keys - rows
        key = torch.arange(keys)
        seen = torch.ones(rows, keys, dtype=torch.bool)
        if self.left >= 0:
            seen &= key >= own - self.left
        if self.right >= 0:
            seen &= key <= own + self.right
        return seen


def _attend_packed(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    starts: list[int],
    scales: tuple[torch.Tensor | None, ...],
    shape: _Shape,
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads = keys[0].shape[1]
    for scale in scales:
        if scale is not None:
            _need(scale.dtype == torch.float32 and scale.shape == (len(keys), kv_heads), "a descale's shape or dtype")
    if shape.sinks is not None:
        _need(shape.sinks.dtype == torch.bfloat16 and shape.sinks.shape == q.shape[1:2], "the sinks' shape or dtype")
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = torch.full((*q.shape[:2], values[0].shape[-1]), torch.nan, dtype=dtype)
    lse = torch.full(q.shape[1::-1], torch.nan)
    for request, (begin, end) in enumerate(pairwise(starts)):
        one = [1.0 if scale is None else scale[request][None, :, None] for scale in scales]
        key, value = keys[request].float() * one[1], values[request].float() * one[2]
        query = q[begin:end].float().unflatten(1, (kv_heads, -1))  # [rows, KV heads, heads of each, D]
        query = query * (one[0] if scales[0] is None else one[0][..., None])
        found = _attend(query, key, value, shape)
        out[begin:end] = found[0].flatten(1, 2).to(dtype)
        lse[:, begin:end] = found[1].flatten(1, 2).T
    return out, lse


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: _Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """query: [rows, KV heads, heads of each, D]; key, value: [keys, KV heads, D]. Rows that see nothing are zero."""
    scores = torch.einsum("rkhd,ckd->rkhc", query, key) * shape.scale
    if shape.softcap > 0:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.masked_fill(~shape.visible(len(query), len(key))[:, None, None], -math.inf)
    if shape.sinks is not None:
        sinks = shape.sinks.float().view(1, *query.shape[1:3], 1).expand(len(query), -1, -1, -1)
        scores = torch.cat((scores, sinks), -1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])[..., : len(key)]
    return torch.einsum("rkhc,ckd->rkhd", weights, value), lse


def _returned(found: torch.Tensor, lse: torch.Tensor, out: torch.Tensor | None, with_lse: bool) -> Any:
    if out is not None:
        _need(out.shape == found.shape and out.dtype == found.dtype, "the given output's shape or dtype")
        found = out.copy_(found)
    return (found, lse) if with_lse else found


def _pages(row: torch.Tensor, length: int, page_size: int, pages: int) -> torch.Tensor:
    """The pages of a request's keys. Raises where the kernel would leave the request's row, or the pool."""
    _need(length >= 0, f"cache_seqlens is {length}")
    room = len(row) * page_size
    _need(length <= room, f"cache_seqlens is {length}; the page table's row ends at {room}")
    live = row[: -(-length // page_size)].long()
    wrong = live[(live < 0) | (live >= pages)].tolist()
    _need(not wrong, f"pages {wrong} are not among the pool's {pages}")
    return live


def _check_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: int) -> None:
    _need(q.dtype in DTYPES, f"rows of {q.dtype}")
    _need(k.dtype == q.dtype and v.dtype == q.dtype, f"rows of {q.dtype} over {k.dtype} and {v.dtype}")
    _need(q.dim() == 3 and k.dim() == dims and v.dim() == dims, f"{q.dim()}, {k.dim()} and {v.dim()} dimensions")
    _need(q.shape[-1] == k.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"heads of {q.shape[-1]}")
    _need(k.shape[:-1] == v.shape[:-1] and q.shape[1] % k.shape[-2] == 0, f"{q.shape[1]} heads over {k.shape[-2]}")
    _need(all(one.stride(-1) == 1 for one in (q, k, v)), "the last dimension is not contiguous")


def _check_table(table: torch.Tensor, batch: int, pages: int) -> None:
    _need(table.dtype == torch.int32, f"a page table of {table.dtype}")
    _need(table.dim() == 2 and table.stride(-1) == 1, "the page table's last dimension is not contiguous")
    _need(batch > 0 and pages > 0, "an empty batch or pool")


def _check_ints(name: str, tensor: torch.Tensor, length: int) -> None:
    _need(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name} of {tensor.dtype}, or not contiguous")
    _need(tensor.shape == (length,), f"{name} has shape {tuple(tensor.shape)}, not ({length},)")


def _check_starts(name: str, tensor: torch.Tensor, batch: int, rows: int) -> None:
    _check_ints(name, tensor, batch + 1)
    _need(tensor[0] == 0 and bool((tensor.diff() >= 0).all()), f"{name} does not ascend from 0")
    _need(int(tensor[-1]) <= rows, f"{name} ends at {int(tensor[-1])} of {rows}")


def _refuse(unset: tuple[Any, ...], attention_chunk: int | None, unknown: dict[str, Any]) -> None:
    known = all(one is None for one in unset) and not attention_chunk
    if not known or any(value not in (None, False) for value in unknown.values()):
        raise NotImplementedError(f"an argument that the stub does not know is set: {unknown or unset}")


def _need(holds: Any, why: str) -> None:
    if not holds:
        raise KernelError(why)

"""Fused elementwise kernels of a decoder layer, so that the toy step does not time unfused torch ops."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, out, EPS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lane = tl.arange(0, LANES)
    valid = lane < WIDTH
    total = tl.load(x + row + lane, mask=valid, other=0.0).to(tl.float32)
    total += tl.load(residual + row + lane, mask=valid, other=0.0).to(tl.float32)
    tl.store(residual + row + lane, total.to(residual.dtype.element_ty), mask=valid)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / WIDTH + EPS)
    normed = total * scale * tl.load(weight + lane, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row + lane, normed.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=valid)


@triton.jit
def _qk_norm_rope_kernel(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    q_out,
    k_cache,
    v_cache,
    prefix,
    capacity,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program per row and head (queries, then keys, then values).

    qkv: [B * ROWS, (GROUPS + 2) * KV_HEADS * DIM]; q_out: [B, KV_HEADS, GROUPS * ROWS, DIM]; caches: [B, KV_HEADS,
    capacity, DIM]; rows from `prefix` on are written. Positions start at `prefix`.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    HEADS: tl.constexpr = GROUPS * KV_HEADS
    HALF: tl.constexpr = DIM // 2
    request, step = row // ROWS, row % ROWS
    half = tl.arange(0, HALF)
    source = qkv + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * DIM
    first = tl.load(source + half).to(tl.float32)
    second = tl.load(source + HALF + half).to(tl.float32)
    if head < HEADS + KV_HEADS:
        is_query = head < HEADS
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + 1e-6)
        weight_first = tl.where(is_query, tl.load(q_weight + half), tl.load(k_weight + half)).to(tl.float32)
        weight_second = tl.where(is_query, tl.load(q_weight + HALF + half), tl.load(k_weight + HALF + half))
        first = first * scale * weight_first
        second = second * scale * weight_second.to(tl.float32)
        angle = cos_sin + (prefix + step) * DIM + half
        cos, sin = tl.load(angle), tl.load(angle + HALF)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    element = q_out.dtype.element_ty
    if head < HEADS:
        kv_head, group = head // GROUPS, head % GROUPS
        target = q_out + (((request * KV_HEADS + kv_head) * GROUPS + group) * ROWS + step).to(tl.int64) * DIM
    else:
        kv_head = (head - HEADS) % KV_HEADS
        cache = k_cache if head < HEADS + KV_HEADS else v_cache
        target = cache + ((request * KV_HEADS + kv_head).to(tl.int64) * capacity + prefix + step) * DIM
    tl.store(target + half, first.to(element))
    tl.store(target + HALF + half, second.to(element))


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Adds `x` [N, H] to `residual` in place; returns the RMS-normed sum [N, H]."""
    out = torch.empty_like(x)
    width = x.shape[1]
    lanes = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(len(x),)](x, residual, weight, out, EPS=1e-6, WIDTH=width, LANES=lanes, num_warps=8)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [N, 2 * I] -> [N, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, 1024))](gate_up, out, WIDTH=width, BLOCK=1024)
    return out


def qk_norm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix: int,
    groups: int,
) -> torch.Tensor:
    """Writes keys and values of the rows after the prefix; returns the queries, grouped by KV head (see the kernel)."""
    batch, kv_heads, capacity, dim = k_cache.shape
    rows = len(qkv) // batch
    q_out = torch.empty((batch, kv_heads, groups * rows, dim), dtype=qkv.dtype, device=qkv.device)
    grid = (len(qkv), (groups + 2) * kv_heads)
    _qk_norm_rope_kernel[grid](
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        q_out,
        k_cache,
        v_cache,
        prefix,
        capacity,
        ROWS=rows,
        GROUPS=groups,
        KV_HEADS=kv_heads,
        DIM=dim,
        num_warps=1,
    )
    return q_out

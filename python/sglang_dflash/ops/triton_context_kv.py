"""Context KV in Triton: key norm, rotary embedding and the write into every layer's buffers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.ops.kv_buffers import FP8, KVBuffers


@triton.jit(do_not_specialize_on_alignment=("positions", "slots"))
def _write_context_kv_kernel(
    kv,
    k_norm_weight,
    positions,
    cos_sin,
    slots,
    pointers,
    slot_stride,
    eps,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    DIM_LANES: tl.constexpr,
    FP8: tl.constexpr,
):
    """One program per row and layer. kv: [N, LAYERS, 2, HEADS, DIM]; pointers: [2, LAYERS] int64."""
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    head = tl.arange(0, HEAD_LANES)[:, None]
    column = tl.arange(0, DIM_LANES)[None, :]
    valid = (head < HEADS) & (column < DIM)
    element = kv.dtype.element_ty
    held = tl.float8e4nv if FP8 else element

    source = kv + (row * LAYERS + layer) * 2 * HEADS * DIM
    k = tl.load(source + head * DIM + column, mask=valid, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(k * k, 1) / DIM + eps)  # [HEAD_LANES]
    weights = k_norm_weight + layer * DIM
    k = k * scale[:, None] * tl.load(weights + column, mask=column < DIM, other=0.0).to(tl.float32)

    # Element i of the first half is rotated with element i + ROTARY / 2; elements from ROTARY on are unchanged.
    HALF: tl.constexpr = ROTARY // 2
    turns = column < ROTARY
    first = column < HALF
    partner = tl.where(first, column + HALF, column - HALF)
    other = tl.load(source + head * DIM + partner, mask=valid & turns, other=0.0).to(tl.float32)
    other = other * scale[:, None] * tl.load(weights + partner, mask=turns, other=0.0).to(tl.float32)
    angle = cos_sin + tl.load(positions + row) * ROTARY + tl.where(first, column, column - HALF)
    cos = tl.load(angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=turns, other=0.0).to(tl.float32)
    k = k * cos + other * tl.where(first, -sin, sin)

    target = tl.load(slots + row).to(tl.int64) * slot_stride + head * DIM + column
    # The compiler cannot know the alignment of a loaded address. Without this hint it stores element by element.
    k_buffer = tl.multiple_of(tl.load(pointers + layer).to(tl.pointer_type(held)), 16)
    v_buffer = tl.multiple_of(tl.load(pointers + LAYERS + layer).to(tl.pointer_type(held)), 16)
    v = tl.load(source + HEADS * DIM + head * DIM + column, mask=valid)
    tl.store(k_buffer + target, k.to(element).to(held), mask=valid)  # SGLang rounds twice, too
    tl.store(v_buffer + target, v.to(held), mask=valid)


def write_context_kv(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    buffers: KVBuffers,
) -> None:
    """`reference.write_context_kv`; one launch, float32 inside."""
    rows, layers, _, heads, dim = kv.shape
    buffers.check(kv)
    assert kv.is_contiguous() and k_norm_weight.is_contiguous() and cos_sin.is_contiguous()
    assert len(positions) == len(slots) == rows, (len(positions), len(slots), rows)
    if rows:
        _write_context_kv_kernel[(rows, layers)](
            kv,
            k_norm_weight,
            positions.contiguous(),
            cos_sin,
            slots.contiguous(),
            buffers.pointers,
            buffers.slot_stride,
            eps,
            LAYERS=layers,
            HEADS=heads,
            DIM=dim,
            ROTARY=cos_sin.shape[1],
            HEAD_LANES=triton.next_power_of_2(heads),
            DIM_LANES=triton.next_power_of_2(dim),
            FP8=buffers.k[0].dtype == FP8,
            num_warps=4,
        )

"""Context KV in Triton, interpreted, against the reference: at most twice the error of torch in the same dtype."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.ops import FP8, KVBuffers, reference, triton_context_kv

SENTINEL = 77.0
SLOTS = 40


def _buffers(layers: int, heads: int, dim: int, dtype: torch.dtype) -> KVBuffers:
    def each() -> list[torch.Tensor]:
        return [torch.full((SLOTS, heads, dim), SENTINEL, dtype=dtype) for _ in range(layers)]

    return KVBuffers(each(), each())


def _inputs(rows: int, layers: int, heads: int, dim: int, rotary: int, dtype: torch.dtype, generator: torch.Generator):
    kv = (torch.randn(rows, layers, 2, heads, dim, generator=generator) * 3).to(dtype)
    k_norm_weight = (torch.rand(layers, dim, generator=generator) + 0.5).to(dtype)
    positions = torch.randint(0, 500, (rows,), generator=generator)
    frequencies = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    angles = torch.outer(torch.arange(500.0), frequencies)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    slots = torch.randperm(SLOTS, generator=generator)[:rows]
    return kv, k_norm_weight, 1e-6, positions, cos_sin, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("rows", "layers", "heads", "dim", "rotary"),
    [(0, 2, 2, 8, 8), (1, 1, 1, 4, 4), (9, 3, 2, 16, 16), (7, 2, 3, 24, 24), (5, 2, 5, 20, 8), (16, 5, 8, 128, 128)],
)
def test_write_context_kv(rows, layers, heads, dim, rotary, slot_dtype, dtype):
    """Fails where a key's error against float32 is above twice torch's, a value is not copied bit by bit, or a slot
    without a row changes."""
    inputs = _inputs(rows, layers, heads, dim, rotary, dtype, torch.Generator().manual_seed(rows + dim))
    *numbers, slots = inputs
    got, torch_body, exact = (
        _buffers(layers, heads, dim, dtype),
        _buffers(layers, heads, dim, dtype),
        _buffers(layers, heads, dim, torch.float32),
    )
    triton_context_kv.write_context_kv(*numbers, slots.to(slot_dtype), got)
    reference.write_context_kv(*inputs, torch_body)
    wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    reference.write_context_kv(*wide, exact)
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[slots] = False
    for layer in range(layers):
        assert torch.equal(got.v[layer], torch_body.v[layer])
        assert (got.k[layer][untouched] == SENTINEL).all()
        allowed = 2 * (torch_body.k[layer].float() - exact.k[layer]).abs().max() + 1e-6 * exact.k[layer].abs().max()
        assert (got.k[layer].float() - exact.k[layer]).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_in_fp8(dtype):
    """Fails where rows are rounded to other values of FP8 than the nearest ones, or where another slot changes."""
    inputs = _inputs(9, 3, 2, 16, 16, dtype, torch.Generator().manual_seed(5))
    slots = inputs[-1]
    got, expected = _buffers(3, 2, 16, FP8), _buffers(3, 2, 16, FP8)
    triton_context_kv.write_context_kv(*inputs, got)
    reference.write_context_kv(*inputs, expected)
    assert not torch.equal(expected.k[0].float()[slots], torch.full((9, 2, 16), SENTINEL).to(FP8).float())
    for least, held, torch_body in ((0.9, got.k, expected.k), (0.98, got.v, expected.v)):
        for own, others in zip(held, torch_body, strict=True):
            # Where a value is rounded up to a power of two, the interpreter forgets to raise the exponent; small values
            # it cuts.
            judged = others.float().abs().log2() % 1 != 0
            assert judged.float().mean() > 0.8
            assert (own.view(torch.uint8) == others.view(torch.uint8))[judged].float().mean() >= least


def test_slots_with_a_larger_stride():
    """Fails where the stride of the slots is assumed to be heads * dim."""
    generator = torch.Generator().manual_seed(0)
    inputs = _inputs(6, 2, 2, 16, 16, torch.float32, generator)
    backing = torch.full((2, 2, SLOTS, 5, 16), SENTINEL)
    got = KVBuffers(list(backing[0, :, :, :2]), list(backing[1, :, :, :2]))
    expected = _buffers(2, 2, 16, torch.float32)
    triton_context_kv.write_context_kv(*inputs, got)
    reference.write_context_kv(*inputs, expected)
    assert (backing[:, :, :, 2:] == SENTINEL).all()
    for layer in range(2):
        torch.testing.assert_close(got.k[layer], expected.k[layer], rtol=1e-5, atol=1e-5)
        assert torch.equal(got.v[layer], expected.v[layer])

"""The native row-wise ops against their torch references: integers bitwise, floats by their error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cpu.ops import REFERENCE_KERNELS, choose_kernels, native

pytestmark = pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SENTINEL = -77.0
EPS = 1e-6


def native_rows():
    rows = choose_kernels(torch.float32, torch.bfloat16)
    assert rows.native
    return rows


def near(got: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor, roundings: int = 1) -> None:
    """Asserts at most twice the error of torch in the same dtype, plus so many roundings; `truth` is float64."""
    assert got.shape == expected.shape == truth.shape
    assert got.dtype == expected.dtype
    if not got.numel():
        return
    rounding = torch.finfo(got.dtype).eps * truth.abs().max()
    allowed = 2 * (expected.double() - truth).abs().max() + roundings * rounding
    error = (got.double() - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def exact_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    wide = x.double()
    return wide if weight is None else wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def exact_rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x: [N, heads, D] float64."""
    half = cos_sin.shape[1] // 2
    cos, sin = (part[:, None] for part in cos_sin.double()[positions].split(half, -1))
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (0, 64), (5, 1), (3, 17), (2, 3, 128), (40, 1000)])
def test_rms_norm(shape, dtype):
    """Fails where a row's end, its mean or its weight is wrong."""
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for own in (weight, weight.float()):
        near(native_rows().rms_norm(x, own, EPS), REFERENCE_KERNELS.rms_norm(x, own, EPS), exact_norm(x, own))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (0, 64), (3, 17), (2, 3, 128), (40, 1000)])
def test_add_rms_norm(shape, dtype):
    """Fails where the norm is that of the rounded sum, or an argument changes."""
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone(), residual.clone()
    got, expected = (rows.add_rms_norm(x, residual, weight, EPS) for rows in (native_rows(), REFERENCE_KERNELS))
    total = x.double() + residual.double()
    near(got[0], expected[0], exact_norm(total, weight))
    assert torch.equal(got[1], expected[1])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@settings(max_examples=120, deadline=None)
@given(
    rows=st.integers(0, 9),
    heads=st.integers(1, 5),
    dim=st.integers(2, 140),
    half=st.integers(1, 70),
    normed=st.booleans(),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16])] * 3),
)
def test_norm_rope(rows, heads, dim, half, normed, dtypes):
    """Fails where a head's norm or rotation is wrong for any size, or memory between strided rows is written."""
    dtype, weight_dtype, table_dtype = dtypes
    rotary_dim = 2 * min(half, dim // 2)
    wide = torch.full((rows, heads * dim + 13), SENTINEL).to(dtype)
    x = wide[:, : heads * dim].unflatten(1, (heads, dim))
    x.copy_(torch.randn(rows, heads, dim))
    angles = torch.rand(20, rotary_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(table_dtype)
    positions = torch.randint(20, (rows,))
    weight = torch.randn(dim).to(weight_dtype) if normed else None
    expected = x.clone()
    truth = exact_rope(exact_norm(x, weight), positions, cos_sin)
    REFERENCE_KERNELS.norm_rope_(expected, weight, EPS, positions, cos_sin)
    native_rows().norm_rope_(x, weight, EPS, positions, cos_sin)
    near(x, expected, truth, roundings=4)  # of norm, weight, product and sum: torch may be lucky with each
    assert (wide[:, heads * dim :] == SENTINEL).all()


def test_torch_can_trace_through_them():
    """Fails where the fake tensors or the schemas of the ops do not match what they do."""
    compiled, x = torch.ops.sglang_cpu, torch.randn(4, 16)
    table, positions = torch.zeros(9, 8), torch.tensor([1, 2, 3, 4])
    calls = {
        compiled.rms_norm: (x, torch.ones(16), EPS),
        compiled.add_rms_norm: (x, x.clone(), torch.ones(16), EPS),
        compiled.norm_rope_: (x.view(4, 2, 8).clone(), torch.ones(8), EPS, positions, table),
        compiled.linear: (x, torch.randn(7, 16), torch.randn(7)),
        compiled.row_argmax: (x,),
        compiled.best_log_probs: (x,),
    }
    for call, arguments in calls.items():
        torch.library.opcheck(call.default, arguments, test_utils=("test_schema", "test_faketensor"))

"""The native product against torch in float64; a row's bits must not depend on other rows."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_cpu.ops import native

pytestmark = pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
DTYPES = [torch.float32, torch.bfloat16]


def linear(x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.sglang_cpu.linear(x, weight, addend)


def drawn(rows: int, inner: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7919 + inner * 31 + columns)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (columns, inner), columns))
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def near(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, addend: torch.Tensor | None) -> None:
    """Asserts that the error is at most that of a float32 sum which is rounded once."""
    wide = torch.zeros(len(weight), dtype=torch.float64) if addend is None else addend.double()
    truth = F.linear(x.double(), weight.double()) + wide
    size = F.linear(x.double().abs(), weight.double().abs()) + wide.abs()
    allowed = size * (x.shape[1] + 2) * 2**-24 + truth.abs() * torch.finfo(x.dtype).eps
    assert got.shape == truth.shape
    assert got.dtype == x.dtype
    assert bool(((got.double() - truth).abs() <= allowed).all()), (got.double() - truth).abs().max()


@settings(max_examples=150, deadline=None)
@given(
    rows=st.one_of(st.integers(0, 140), st.integers(510, 520)),
    inner=st.one_of(st.integers(0, 40), st.integers(1, 700)),
    columns=st.integers(0, 130),
    dtype=st.sampled_from(DTYPES),
    adds=st.sampled_from(["nothing", "bias", "residual"]),
)
def test_it_is_the_product(rows, inner, columns, dtype, adds):
    """Fails where a row, a column or the end of a sum is missing or counted twice."""
    x, weight, bias = drawn(rows, inner, columns, dtype)
    addend = {"nothing": None, "bias": bias, "residual": torch.randn(rows, columns + 3)[:, 3:].to(dtype)}[adds]
    near(linear(x, weight, addend), x, weight, addend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "columns"), [(256, 1152), (37, 53), (1024, 100), (600, 61)])
def test_a_rows_bits_depend_on_it_alone(inner, columns, dtype):
    """Fails where the shape of a tile, a panel that sums or folds in another order than a tile, the threads or other
    rows change the rounding of a sum."""
    x, weight, bias = drawn(160, inner, columns, dtype)
    alone = torch.cat([linear(x[i : i + 1], weight, bias) for i in range(160)])
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for rows in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 40, 48, 57, 64, 65, 128, 145, 160):
                assert torch.equal(linear(x[:rows], weight, bias), alone[:rows]), (count, rows)
    finally:
        torch.set_num_threads(threads)


def test_slices_are_read_in_place():
    """Fails where strides are ignored: the target's head without its padding, rows of a larger tensor."""
    wide_x, wide_weight, bias = drawn(9, 80, 40, torch.float32)
    x, weight = wide_x[::2, 8:72], wide_weight[:33, 8:72]
    near(linear(x, weight, bias[:33]), x, weight, bias[:33])


def test_what_does_not_fit_is_refused():
    x, weight, bias = drawn(2, 8, 4, torch.float32)
    with pytest.raises(RuntimeError, match="dense rows"):
        linear(x, weight.t().contiguous().t())
    with pytest.raises(RuntimeError, match=r"\[2, 7\]"):
        linear(x[:, :7], weight)
    with pytest.raises(RuntimeError, match="BFloat16"):
        linear(x.bfloat16(), weight)
    with pytest.raises(RuntimeError, match="addend is"):
        linear(x, weight, bias[:3])


INSTALLED = """
    import torch, torch.nn.functional as F
    from sglang_cpu.ops import native
    x, weight, bias = torch.randn(129, 40), torch.randn(30, 40), torch.randn(30)
    few, out = x[:128], torch.empty(128, 30)
    before = F.linear(x, weight), F.linear(x, weight, bias)
    native.install_linear()
    native.install_linear()
    assert torch.equal(F.linear(x, weight), before[0]), "more rows than it takes"
    assert torch.equal(F.linear(x, weight, bias), before[1]), "more rows than it takes"
    brief, brief_weight = torch.randn(300, 40).bfloat16(), weight.bfloat16()
    wanted = torch.ops.sglang_cpu.linear(brief, brief_weight, None)
    emulated = native.isa() != "scalar" and not torch.cpu._is_avx512_bf16_supported()
    assert not emulated or torch.equal(F.linear(brief, brief_weight), wanted)
    plain, biased = (torch.ops.sglang_cpu.linear(few, weight, one) for one in (None, bias))
    assert native.isa() == "scalar" or not torch.equal(plain, before[0][:128]), "torch computes the same bits"
    close = lambda a, b: torch.allclose(a, b, atol=1e-4)
    same = torch.equal if native.isa() != "scalar" else close
    assert same(F.linear(few, weight), plain) and same(F.linear(few, weight, bias), biased)
    assert same(F.linear(few[None], weight)[0], plain)
    torch.mm(few, weight.t(), out=out); assert same(out, plain)
    torch.addmm(bias, few, weight.t(), out=out); assert same(out, biased)
    residual = torch.randn(128, 30); torch.addmm(residual, few, weight.t(), out=out)
    assert same(out, torch.ops.sglang_cpu.linear(few, weight, residual))
    halves = torch.empty(128, 60); torch.mm(few, weight.t(), out=halves[:, 30:]); assert same(halves[:, 30:], plain)
    near = lambda a, b: torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)
    truth, wide_bias = few.double() @ weight.double().t(), bias.double()
    near(torch.addmm(bias, few, weight.t(), alpha=2, beta=3), 3 * wide_bias + 2 * truth)
    near(torch.addmm(bias[:1], few, weight.t()), wide_bias[:1] + truth)
    near(few @ weight.t().contiguous(), truth)
    weight.requires_grad_(); F.linear(few, weight, bias).sum().backward()
    near(weight.grad[0], few.double().sum(0))
    try: torch.mm(few, torch.randn(39, 3))
    except RuntimeError as error: assert "cannot be multiplied" in str(error)
    else: raise AssertionError("shapes that do not fit")
"""

THREADS = """
    import os, torch
    from sglang_cpu.ops import native
    native.isa()
    torch.set_num_threads(1)
    x, weight = torch.ones(8, 512), torch.ones(2000, 512)
    torch.set_num_threads(3)
    before = len(os.listdir("/proc/self/task"))
    torch.ops.sglang_cpu.linear(x, weight, None)
    assert len(os.listdir("/proc/self/task")) == before + 2, "the op computed on one thread"
"""


@pytest.mark.parametrize("program", [INSTALLED, THREADS], ids=["installed", "threads"])
def test_in_a_process_of_its_own(program):
    """`installed`: fails where torch's products are not replaced, or replaced where they must not be. `threads`: fails
    where the ops do not use torch's threads; at::parallel_for is a plain loop in a unit compiled without OpenMP."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr

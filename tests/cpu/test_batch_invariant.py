"""Products and activations for a plain CPU: they are right, and a row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sglang_cpu.ops import batch_invariant, install_batch_invariant_kernels, native

pytestmark = pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SHAPES = [(256, 512), (576, 256), (256, 1792), (96, 3), (100, 40), (1024, 64)]  # [K, N]
COUNTS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 31, 64, 100]
ROWS = 120


@pytest.fixture(autouse=True)
def _installed():
    torch.manual_seed(0)
    library = install_batch_invariant_kernels()
    yield
    library._destroy()


@pytest.fixture(params=[1, 3], ids=lambda count: f"{count}-threads")
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def same_alone_and_together(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    """Whether every row of `x` gives the same bits in slices of many lengths and positions."""
    together = function(x)
    slices = [(first, first + count) for count in COUNTS for first in (0, 1, 6, len(x) - count)]
    return all(torch.equal(function(x[begin:end]), together[begin:end]) for begin, end in slices)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_goes_row_by_row(shape, dtype, _threads):
    """Fails where a row's product depends on the number of rows or on their position. Torch's own float32 kernel fails
    here: batches of one to three rows differ from larger ones."""
    x, weight = torch.randn(ROWS, shape[0]).to(dtype), torch.randn(shape[1], shape[0]).to(dtype)
    bias = torch.randn(shape[1]).to(dtype)
    assert same_alone_and_together(lambda rows: F.linear(rows, weight), x)
    assert same_alone_and_together(lambda rows: F.linear(rows, weight, bias), x)
    assert same_alone_and_together(lambda rows: torch.matmul(rows, weight.T), x)
    odd_place = torch.empty(x.numel() + 1, dtype=dtype)[1:].view_as(x).copy_(x)
    assert torch.equal(F.linear(odd_place, weight), F.linear(x, weight))
    rows_of_weight = weight.T.contiguous()  # its transpose is no dense weight
    assert same_alone_and_together(lambda rows: torch.matmul(rows, rows_of_weight), x)


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 256, 576, 1001])
def test_an_activation_goes_row_by_row(width, dtype, _threads):
    """Fails where elements after the last full vector are computed by another function. Torch's own SiLU fails at width
    1001, in every slice that ends at another element."""
    x = (torch.randn(ROWS, 2 * width) * 4).to(dtype)[:, :width]  # like a gate, next to its up projection
    for function in (F.silu, F.gelu, lambda rows: F.gelu(rows, approximate="tanh"), torch.sigmoid):
        assert same_alone_and_together(function, x)


@pytest.mark.parametrize("width", [64, 256, 1001, 1792])
def test_torch_functions_that_we_keep_go_row_by_row(width, _threads):
    """Fails where a torch function that norms or the sampler use unchanged mixes rows on this machine."""
    x = torch.randn(ROWS, width) * 3
    probs = (torch.softmax(x, -1) * 50).round()  # with ties
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda rows: torch.softmax(rows, -1),
        lambda rows: torch.log_softmax(rows, -1),
        lambda rows: torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda rows: rows.softmax(-1).double().log(),
    ]
    assert all(same_alone_and_together(function, x) for function in functions)
    assert same_alone_and_together(lambda rows: rows.sort(-1, descending=True)[1], probs)
    assert same_alone_and_together(lambda rows: rows.argmax(-1), probs)


@DTYPES
def test_values_are_right(dtype):
    """Fails where the error against float64 is above twice torch's own: a wrong formula, or a misplaced tile."""
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((21, 40), (30, 40), (30,)))
    library = batch_invariant
    pairs = [
        (library.mm(x, weight.T), lambda t: torch.mm(x.to(t), weight.to(t).T)),
        (library.addmm(bias, x, weight.T), lambda t: torch.addmm(bias.to(t), x.to(t), weight.to(t).T)),
        (
            library.addmm(bias, x, weight.T, beta=0.5, alpha=-2),
            lambda t: torch.addmm(bias.to(t), x.to(t), weight.to(t).T, beta=0.5, alpha=-2),
        ),
        (library.silu(x), lambda t: F.silu(x.to(t))),
        (library.sigmoid(x), lambda t: torch.sigmoid(x.to(t))),
        (library.gelu(x), lambda t: F.gelu(x.to(t))),
        (library.gelu(x, approximate="tanh"), lambda t: F.gelu(x.to(t), approximate="tanh")),
    ]
    for ours, function in pairs:
        exact = function(torch.float64)
        assert ours.dtype == dtype and ours.shape == exact.shape
        allowed = 2 * (exact.to(dtype).double() - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (ours.double() - exact).abs().max() <= allowed


def test_empty_batch():
    """Fails where an empty batch raises."""
    assert F.linear(torch.empty(0, 4), torch.randn(3, 4)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_other_dtypes_keep_torchs_product(dtype):
    """Fails where a product outside the model ends the process, or calls itself without end."""
    assert torch.equal(torch.ones(2, 3, dtype=dtype) @ torch.ones(3, 2, dtype=dtype), torch.full((2, 2), 3).to(dtype))

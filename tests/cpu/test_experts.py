"""The experts of a mixture: the specification against transformers' experts, the native body against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from sglang_cpu.ops import choose_kernels, native
from sglang_cpu.ops.mixture import ACTIVATIONS, experts

needs_native = pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
DTYPES = [torch.float32, torch.bfloat16]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(
    tokens: int, count: int, each: int, size: int, inner: int, dtype: torch.dtype, activation: str = "silu"
) -> Inputs:
    """x, up, down, ids and weights; each row's experts are distinct."""
    torch.manual_seed(tokens * 7919 + count * 31 + size + inner)
    columns = inner if activation == "relu2" else 2 * inner
    x, up, down = torch.randn(tokens, size), torch.randn(count, columns, size), torch.randn(count, size, inner)
    ids = torch.rand(tokens, count).argsort(-1)[:, :each].int()
    return x.to(dtype), up.to(dtype), down.to(dtype), ids, torch.rand(tokens, each)


def compiled(x, up, down, ids, weights, activation):
    return torch.ops.sglang_cpu.experts(x, up, down, ids, weights, activation)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_specification_is_transformers_experts(activation: str, tokens: int) -> None:
    """Fails where gate and up are swapped, or a row's weights belong to another expert."""
    x, up, down, ids, weights = drawn(tokens, 6, 2, 24, 40, torch.float32)
    config = Qwen3MoeConfig(num_experts=6, hidden_size=24, moe_intermediate_size=40, hidden_act=activation)
    theirs = Qwen3MoeExperts(config)
    theirs.gate_up_proj.data, theirs.down_proj.data = up, down
    with torch.no_grad():
        expected = theirs(x, ids.long(), weights)
    out = experts(x, up, down, ids, weights, activation.partition("_")[0])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def exactly(x, up, down, ids, weights, activation) -> torch.Tensor:
    """Row by row in float64."""
    rows = []
    for row, own, factors in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        total = row * 0
        for e, factor in zip(own, factors, strict=True):
            if e != -1:
                total = total + factor * (down[e].double() @ ACTIVATIONS[activation](up[e].double() @ row))
        rows.append(total)
    return torch.stack(rows) if rows else x.double()


@needs_native
@settings(max_examples=120, deadline=None)
@given(
    tokens=st.integers(0, 70),
    count=st.integers(1, 9),
    each=st.integers(1, 9),
    size=st.integers(1, 140),
    inner=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    here=st.sampled_from([0, 1, 4, 9]),
)
def test_the_native_body_is_the_specification(tokens, count, each, size, inner, dtype, activation, here) -> None:
    """Fails where a row, a column or an expert is missing, an activation is another, or an expert of another rank adds
    something. here: number of experts of this rank."""
    x, up, down, ids, weights = drawn(tokens, count, min(each, count), size, inner, dtype, activation)
    inputs = x, up, down, torch.where(ids < here, ids, -1), weights
    exact = exactly(*inputs, activation)
    ours, theirs = (body(*inputs, activation) for body in (compiled, experts))
    assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
    if tokens:
        # The last term: float32 sums whose parts cancel each other.
        parts = exactly(x.abs(), up.abs(), down.abs(), inputs[3], weights, activation).max()
        allowed = 2 * (theirs - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max() + 2**-22 * parts
        assert (ours - exact).abs().max() <= allowed


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_rows_bits_depend_on_it_alone(dtype: torch.dtype, activation: str) -> None:
    """Fails where other rows of an expert, the order of the rows or the threads change the rounding of a sum."""
    x, up, down, ids, weights = drawn(70, 5, 2, 100, 72, dtype, activation)

    def of(rows: Any) -> torch.Tensor:
        return compiled(x[rows], up, down, ids[rows], weights[rows], activation)

    alone = torch.cat([of([row]) for row in range(70)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for count in (2, 3, 17, 70):
                assert torch.equal(of(slice(count)), alone[:count]), (threads, count)
            assert torch.equal(of(torch.arange(69, -1, -1)), alone.flip(0)), threads
    finally:
        torch.set_num_threads(before)


@needs_native
def test_slices_are_read_in_place_and_ids_may_be_wide() -> None:
    """Fails where strides are ignored, or int64 ids are read as int32."""
    x, up, down, ids, weights = drawn(7, 4, 2, 32, 48, torch.float32)
    wide_up, wide_down = torch.randn(4, 96, 40), torch.randn(6, 32, 60)
    wide_up[:, :, :32], wide_down[2:, :, :48] = up, down
    sliced = compiled(x, wide_up[:, :, :32], wide_down[2:, :, :48], ids.long(), weights.double(), "silu")
    assert torch.equal(sliced, compiled(x, up, down, ids, weights, "silu"))


@needs_native
def test_extreme_activations_stay_finite() -> None:
    """Fails where a sigmoid overflows."""
    x, up, down, ids, weights = drawn(3, 4, 2, 16, 8, torch.float32)
    for activation in ("silu", "gelu"):
        out = compiled(x * 1e8, up, down * 1e-8, ids, weights, activation)
        torch.testing.assert_close(
            out, experts(x * 1e8, up, down * 1e-8, ids, weights, activation), rtol=1e-4, atol=1e4
        )


@needs_native
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": torch.tensor([[0, 4]])}, "ids"),
        ({"ids": torch.tensor([[0, -2]])}, "ids"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "ids are"),
        ({"activation": "tanh"}, "allowed: silu, gelu, relu2"),
        ({"activation": "relu2"}, "do not fit relu2"),
        ({"down": torch.zeros(4, 16, 9)}, "do not fit silu"),
        ({"x": torch.zeros(1, 16, dtype=torch.bfloat16)}, "BFloat16"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    """Fails where an id outside the experts, or a wrong shape, reads memory that is not the experts'."""
    names = ("x", "up", "down", "ids", "weights", "activation")
    arguments = dict(zip(names, (*drawn(1, 4, 2, 16, 8, torch.float32), "silu"), strict=True)) | change
    with pytest.raises(RuntimeError, match=said):
        compiled(**arguments)


def test_other_dtypes_take_the_specification() -> None:
    """Fails where float16 reaches the native op, which does not take it."""
    inputs = drawn(2, 4, 2, 16, 8, torch.float16)
    chosen = choose_kernels(inputs[0].dtype).experts
    assert torch.equal(chosen(*inputs, "gelu"), experts(*inputs, "gelu"))

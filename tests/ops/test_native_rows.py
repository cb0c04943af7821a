"""The native row-wise ops against their torch references: integers bitwise, floats by their error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.ops import TORCH_KERNELS, KVBuffers, choose_kernels, native

pytestmark = pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SENTINEL = -77.0
EPS = 1e-6


def native_rows():
    rows = choose_kernels("cpu", torch.float32, torch.bfloat16)
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
        near(native_rows().rms_norm(x, own, EPS), TORCH_KERNELS.rms_norm(x, own, EPS), exact_norm(x, own))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (0, 64), (3, 17), (2, 3, 128), (40, 1000)])
def test_add_rms_norm(shape, dtype):
    """Fails where the norm is that of the rounded sum, or an argument changes."""
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone(), residual.clone()
    got, expected = (rows.add_rms_norm(x, residual, weight, EPS) for rows in (native_rows(), TORCH_KERNELS))
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
    TORCH_KERNELS.norm_rope_(expected, weight, EPS, positions, cos_sin)
    native_rows().norm_rope_(x, weight, EPS, positions, cos_sin)
    near(x, expected, truth, roundings=4)  # of norm, weight, product and sum: torch may be lucky with each
    assert (wide[:, heads * dim :] == SENTINEL).all()


@DTYPES
@pytest.mark.parametrize(
    ("rows", "layers", "heads", "dim"), [(1, 2, 2, 32), (40, 3, 1, 24), (7, 1, 8, 128), (0, 2, 1, 16)]
)
def test_write_context_kv(rows, layers, heads, dim, dtype):
    """Fails where a row is written to another slot or layer, or another slot changes."""
    kv = torch.randn(rows, layers, 2, heads, dim).to(dtype)
    weight = torch.randn(layers, dim).to(dtype)
    angles = torch.rand(50, dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions, slots = torch.randint(50, (rows,)), torch.randperm(60)[:rows]
    caches = [[torch.full((60, heads, dim), SENTINEL).to(dtype) for _ in range(2 * layers)] for _ in range(2)]
    for body, own in zip((native_rows(), TORCH_KERNELS), caches, strict=True):
        body.write_context_kv(kv, weight, EPS, positions, cos_sin, slots, KVBuffers(own[:layers], own[layers:]))
    for layer in range(layers):
        truth = caches[1][layer].double()
        truth[slots] = exact_rope(exact_norm(kv[:, layer, 0], weight[layer]), positions, cos_sin)
        near(caches[0][layer], caches[1][layer], truth)
        assert torch.equal(caches[0][layers + layer], caches[1][layers + layer])


@pytest.mark.parametrize(("position", "slot"), [(50, 0), (-1, 0), (0, 60), (0, -1)])
def test_write_context_kv_stays_inside(position, slot):
    """Fails where a position or a slot outside its table is used."""
    cache = torch.zeros(60, 1, 8)
    arguments = (torch.ones(1, 8), EPS, torch.tensor([position]), torch.zeros(50, 8), torch.tensor([slot]))
    with pytest.raises(RuntimeError, match="allowed: 0"):
        native_rows().write_context_kv(torch.ones(1, 1, 2, 1, 8), *arguments, KVBuffers([cache], [cache]))


def assert_accepts_alike(logits: torch.Tensor, ids: torch.Tensor) -> None:
    for got, expected in zip(
        native_rows().accept_greedy(logits, ids), TORCH_KERNELS.accept_greedy(logits, ids), strict=True
    ):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    for rows in logits.unbind(1):  # rows of one position are a whole block apart
        assert torch.equal(native_rows().row_argmax(rows), rows.argmax(-1))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_accept_greedy(data):
    """Fails where ties, NaN, infinities or any number of accepted drafts give other ids than torch's argmax."""
    batch, width = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 9))
    vocabulary = data.draw(st.sampled_from([1, 2, 7, 33, 64, 1000, 1025, 20000, 40000]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    values = data.draw(st.sampled_from(["normal", "ties", "zeros", "nan", "infinite", "minus-infinite"]))
    logits = torch.randn(batch, width, vocabulary, generator=random)
    if values == "ties":
        logits = logits.round()
    elif values == "zeros":
        logits = logits.sign() * 0.0  # zeros of both signs are equal
    elif values in ("nan", "infinite"):
        logits[torch.rand(logits.shape, generator=random) < 2 / vocabulary] = (
            torch.nan if values == "nan" else torch.inf
        )
    elif values == "minus-infinite":
        logits.fill_(-torch.inf)
    logits = logits.to(dtype)
    ids = torch.randint(vocabulary, (batch, width), generator=random)
    agree = torch.rand(batch, width, generator=random) < data.draw(st.sampled_from([0.0, 0.8, 1.0]))
    ids[:, 1:] = torch.where(agree, logits.argmax(-1), ids)[:, :-1]
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.sampled_from([1, 4])))
    assert_accepts_alike(logits, ids)
    torch.set_num_threads(before)


def test_accept_greedy_of_a_part_of_the_vocabulary():
    """Fails where logits with padding after the vocabulary are read as if they were dense."""
    logits = torch.randn(3, 4, 64)
    logits[..., 50:] = 9.0
    assert_accepts_alike(logits[..., :50], torch.randint(50, (3, 4)))


def test_torch_can_trace_through_them():
    """Fails where the fake tensors or the schemas of the ops do not match what they do."""
    compiled, x = torch.ops.sglang_dflash, torch.randn(4, 16)
    table, positions = torch.zeros(9, 8), torch.tensor([1, 2, 3, 4])
    calls = {
        compiled.rms_norm: (x, torch.ones(16), EPS),
        compiled.add_rms_norm: (x, x.clone(), torch.ones(16), EPS),
        compiled.norm_rope_: (x.view(4, 2, 8).clone(), torch.ones(8), EPS, positions, table),
        compiled.linear: (x, torch.randn(7, 16), torch.randn(7)),
        compiled.row_argmax: (x,),
        compiled.accept_greedy: (torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)),
    }
    for call, arguments in calls.items():
        torch.library.opcheck(call.default, arguments, test_utils=("test_schema", "test_faketensor"))


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(0, 5), block_size=st.integers(1, 17), seed=st.integers(0, 99))
def test_block_layout(batch, block_size, seed):
    """Fails where an id, a position or a slot of the block differs."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randint(2**31 - 1, (7, 60), generator=random, dtype=torch.int32)[:, :40]
    bonus_ids = torch.randint(100, (batch,), generator=random)
    prefix_lens = torch.randint(41 - block_size, (batch,), generator=random)
    requests = torch.randint(7, (batch,), generator=random)
    arguments = (bonus_ids, prefix_lens, requests, table, block_size, 99)
    got, expected = native_rows().block_layout(*arguments), TORCH_KERNELS.block_layout(*arguments)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype == torch.int64
        assert torch.equal(ours, theirs)


def test_block_layout_refuses():
    """Fails where the op would read past a row of the table, or past the table."""
    table, ids = torch.zeros(3, 10, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="prefix_lens"):
        native_rows().block_layout(ids, ids + 7, ids, table, 4, 99)
    with pytest.raises(RuntimeError, match="req_pool_indices"):
        native_rows().block_layout(ids, ids, ids + 3, table, 4, 99)

"""The selective scan of Mamba-2: the specification against transformers' Nemotron-H, each body against it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_recurrent import POOL, rows_of
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

from sglang_cpu.ops import choose_kernels, native
from sglang_cpu.ops import recurrent_reference as reference
from sglang_cpu.ops.kernels import Kernels

GROUPS, HEADS = 3, 6
# Head and state dimensions: whole vectors, and a part of a state or of a vector left over.
SIZES = [(16, 32), (21, 19)]
sizes = pytest.mark.parametrize(("head_dim", "state_dim"), SIZES)


def inputs(total: int, head_dim: int, state_dim: int, dtype: torch.dtype = torch.float32):
    """xbc and dt, one row each; what a layer holds; states."""
    torch.manual_seed(1)
    rows = torch.randn(total, HEADS * head_dim + 2 * GROUPS * state_dim).to(dtype), torch.randn(total, HEADS).to(dtype)
    layer = -torch.rand(HEADS).exp(), torch.randn(HEADS), torch.randn(HEADS), GROUPS
    return rows, layer, torch.randn(POOL, HEADS, head_dim, state_dim)


CASES = {
    "decode": ([1] * 5, (), None),
    "one of many is new": ([1] * 3, (1,), None),
    "prefill": ([5, 0, 130, 64], (0, 2), None),
    "prefix hits": ([70, 1, 65], (), {0: 64, 2: 0}),
    "snapshot at the end": ([64, 3], (0,), {0: 64, 1: 3}),
    "nothing": ([], (), None),
    "no rows": ([0, 0], (0,), None),
}


@sizes
@pytest.mark.parametrize("case", CASES)
def test_the_native_body_equals_the_specification(
    native_ops: Kernels, case: str, head_dim: int, state_dim: int
) -> None:
    """Fails where a body computes something else, a state is read from or written to a wrong slot, or a snapshot is
    wrong."""
    lens, fresh, snapshots = CASES[case]
    rows = rows_of(lens, fresh=fresh, snapshots=snapshots)
    row_inputs, layer, states = inputs(sum(lens), head_dim, state_dim)
    expected_states = states.clone()
    expected = reference.selective_scan(*row_inputs, *layer, expected_states, rows)
    out = native_ops.selective_scan(*row_inputs, *layer, states, rows)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)


@sizes
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_verified_rows_equal_decoded_ones(
    ops: Kernels, width: int, state_dtype: torch.dtype, head_dim: int, state_dim: int
) -> None:
    """Fails where a verification changes the pool, or its row i differs in one bit from i + 1 decode steps."""
    batch = 3
    rows = replace(rows_of([width] * batch), scratch=torch.tensor([2, 0, 3]))
    row_inputs, layer, states = inputs(width * batch, head_dim, state_dim)
    states = states.to(state_dtype)
    scratch = torch.full((5, width, *states.shape[1:]), 7.0, dtype=state_dtype)
    before = states.clone()
    out = ops.selective_scan(*row_inputs, *layer, states, rows, scratch).view(batch, width, HEADS, head_dim)
    assert torch.equal(states, before)
    for row in range(width):
        parts = (part.view(batch, width, -1)[:, row].contiguous() for part in row_inputs)
        step = ops.selective_scan(*parts, *layer, states, rows_of([1] * batch))
        assert torch.equal(step, out[:, row])
        assert torch.equal(states[rows.slots], scratch[rows.scratch, row])
    assert (scratch[[1, 4]] == 7).all()


@sizes
@pytest.mark.parametrize("cuts", [[1] * 21, [4, 17], [20, 1]])
def test_bits_do_not_depend_on_the_cuts(ops: Kernels, cuts: list[int], head_dim: int, state_dim: int) -> None:
    """Fails where a prefix hit, a chunk of a prompt or a decode step gives other bits than the whole prompt at once."""
    total = sum(cuts)
    row_inputs, layer, states = inputs(total, head_dim, state_dim)
    whole_states = states.clone()
    out = ops.selective_scan(*row_inputs, *layer, whole_states, rows_of([total]))
    pieces = zip(*(part.split(cuts) for part in row_inputs), strict=True)
    parts = [ops.selective_scan(*piece, *layer, states, rows_of([len(piece[0])])) for piece in pieces]
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(states, whole_states)


@sizes
def test_the_specification_is_that_of_nemotron_h(ops: Kernels, head_dim: int, state_dim: int) -> None:
    """Fails where the scan of a prompt, or a step behind it, is another than in transformers' Nemotron-H."""
    total = 77
    (xbc, dt), (a, dt_bias, skip, _), states = inputs(total + 1, head_dim, state_dim)
    rows = rows_of([total], fresh=(0,))
    x, b, c = (part[None] for part in xbc.split([HEADS * head_dim, *[GROUPS * state_dim] * 2], dim=-1))
    x, b, c = x.unflatten(-1, (HEADS, -1)), b.unflatten(-1, (GROUPS, -1)), c.unflatten(-1, (GROUPS, -1))
    expected, last = nemotron.mamba2_chunk_scan(
        *(x[:, :total], dt[None, :total], a, b[:, :total], c[:, :total]),
        chunk_size=32,
        D=skip,
        dt_bias=dt_bias,
        dt_softplus=True,
        return_final_states=True,
    )
    out = ops.selective_scan(xbc[:total], dt[:total], a, dt_bias, skip, GROUPS, states, rows)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[rows.slots[0]], last[0], rtol=1e-4, atol=1e-4)

    per_head = (HEADS, head_dim)
    expected = nemotron.mamba2_selective_state_update(
        *(last, x[:, total], dt[None, total, :, None].expand(1, *per_head)),
        *(a[:, None, None].expand(*per_head, state_dim), b[:, total], c[:, total]),
        D=skip[:, None].expand(per_head),
        dt_bias=dt_bias[:, None].expand(per_head),
        dt_softplus=True,
    )
    out = ops.selective_scan(xbc[total:], dt[total:], a, dt_bias, skip, GROUPS, states, rows_of([1]))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[rows.slots[0]], last[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
def test_gated_norm_in_groups_is_that_of_nemotron_h(ops: Kernels, groups: int) -> None:
    """Fails where the gate comes behind the norm, or groups share a mean or a weight."""
    torch.manual_seed(3)
    norm = nemotron.Zamba2RMSNormGated(groups * 20, group_size=20, eps=1e-5)
    norm.weight.data.normal_()
    x, gate = torch.randn(9, groups * 20), torch.randn(9, 7 + groups * 20)[:, 7:]
    in_groups = (y.unflatten(-1, (groups, -1)) for y in (x, gate, norm.weight.data))
    out = ops.gated_rms_norm(*in_groups, 1e-5, True, True)
    torch.testing.assert_close(out.flatten(1), norm(x, gate), rtol=1e-5, atol=1e-6)
    assert ops.gated_rms_norm(*(y[:0] for y in (x, gate)), norm.weight.data, 1e-5, True, True).shape == (0, groups * 20)


@sizes
def test_native_bfloat16_is_as_exact_as_torch(head_dim: int, state_dim: int) -> None:
    """Fails where bfloat16 rows lose more than the rounding of inputs and outputs."""
    if native.isa() is None:
        pytest.skip("the native ops are not built")
    ops = choose_kernels(torch.bfloat16)
    row_inputs, layer, states = inputs(9, head_dim, state_dim, torch.bfloat16)
    rows = rows_of([4, 5], fresh=(1,))
    expected = reference.selective_scan(*row_inputs, *layer, states.clone(), rows)
    torch.testing.assert_close(ops.selective_scan(*row_inputs, *layer, states, rows), expected, rtol=1e-2, atol=1e-2)
    x, gate = torch.randn(9, GROUPS, 20).bfloat16(), torch.randn(9, GROUPS, 20).bfloat16()
    weight = torch.randn(GROUPS, 20).bfloat16()
    expected = reference.gated_rms_norm(x, gate, weight, 1e-5, True, True)
    torch.testing.assert_close(ops.gated_rms_norm(x, gate, weight, 1e-5, True, True), expected, rtol=1e-2, atol=1e-2)

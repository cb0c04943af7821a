"""The ops of recurrent layers: the specification against transformers' Qwen3.5, each body against the specification."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from sglang_cpu.ops import choose_kernels, native
from sglang_cpu.ops import recurrent_reference as reference
from sglang_cpu.ops.kernels import Kernels
from sglang_cpu.ops.recurrent_reference import StateRows

K_HEADS, HEADS, K_DIM, V_DIM, TAPS = 2, 4, 16, 8, 4
CHANNELS = 2 * K_HEADS * K_DIM + HEADS * V_DIM
POOL = 12


def rows_of(lens: list[int], seed: int = 0, fresh: tuple[int, ...] = (), snapshots: dict[int, int] | None = None):
    """Requests with so many rows; `snapshots`: request -> rows."""
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed))
    count = len(lens)
    rows = StateRows(
        slots=order[:count],
        row_starts=torch.tensor([0, *lens]).cumsum(0),
        fresh=torch.tensor([request in fresh for request in range(count)], dtype=torch.bool),
    )
    if snapshots is None:
        return rows
    taken = torch.full((count,), -1)
    for request, after in snapshots.items():
        taken[request] = after
    return replace(rows, snapshot_rows=taken, snapshot_slots=order[count : 2 * count])


def inputs(total: int, *, per_key: bool = False, seed: int = 1, dtype: torch.dtype = torch.float32):
    torch.manual_seed(seed)
    qkv = torch.randn(total, CHANNELS, dtype=dtype)
    g = -F.softplus(torch.randn(total, HEADS, *([K_DIM] if per_key else [])))
    beta = torch.randn(total, HEADS).sigmoid()
    states = torch.randn(POOL, HEADS, V_DIM, K_DIM)
    return qkv, g, beta, states


CASES = {
    "decode": ([1] * 5, (), None),
    "one of many is new": ([1] * 3, (1,), None),
    "prefill": ([5, 0, 130, 64], (0, 2), None),
    "prefix hits": ([70, 1, 65], (), {0: 64, 2: 0}),
    "snapshot at the end": ([64, 3], (0,), {0: 64, 1: 3}),
    "nothing": ([], (), None),
    "no rows": ([0, 0], (0,), None),
}


@pytest.mark.parametrize("per_key", [False, True], ids=["a decay per head", "a decay per key dimension"])
@pytest.mark.parametrize("case", CASES)
def test_delta_rule_equals_its_specification(native_ops: Kernels, case: str, per_key: bool) -> None:
    """Fails where a state is read from or written to a wrong slot, or a snapshot is wrong."""
    lens, fresh, snapshots = CASES[case]
    rows = rows_of(lens, fresh=fresh, snapshots=snapshots)
    qkv, g, beta, states = inputs(sum(lens), per_key=per_key)
    expected_states = states.clone()
    expected = reference.delta_rule(qkv, g, beta, K_HEADS, expected_states, rows)
    out = native_ops.delta_rule(qkv, g, beta, K_HEADS, states, rows)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("per_key", [False, True], ids=["a decay per head", "a decay per key dimension"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_verified_rows_equal_decoded_ones(ops: Kernels, width: int, state_dtype: torch.dtype, per_key: bool) -> None:
    """Fails where a verification changes the pool, or its row i differs in one bit from i + 1 decode steps."""
    batch = 3
    rows = replace(rows_of([width] * batch), scratch=torch.tensor([2, 0, 3]))
    qkv, g, beta, states = inputs(width * batch, per_key=per_key)
    states = states.to(state_dtype)
    scratch = torch.full((5, width, HEADS, V_DIM, K_DIM), 7.0, dtype=state_dtype)
    before = states.clone()
    out = ops.delta_rule(qkv, g, beta, K_HEADS, states, rows, scratch).view(batch, width, HEADS, V_DIM)
    assert torch.equal(states, before)
    for row in range(width):
        parts = (part.view(batch, width, *part.shape[1:])[:, row].contiguous() for part in (qkv, g, beta))
        step = ops.delta_rule(*parts, K_HEADS, states, rows_of([1] * batch))
        assert torch.equal(step, out[:, row])
        assert torch.equal(states[rows.slots], scratch[rows.scratch, row])
    assert (scratch[[1, 4]] == 7).all()


@pytest.mark.parametrize("per_key", [False, True])
def test_requests_may_verify_different_numbers_of_rows(ops: Kernels, per_key: bool) -> None:
    """Fails where a request's rows change with the number of rows of others."""
    width, lens = 4, [4, 1, 3]
    whole = replace(rows_of([width] * 3), scratch=torch.tensor([2, 0, 3]))
    some = replace(rows_of(lens), scratch=whole.scratch)
    qkv, g, beta, states = inputs(width * 3, per_key=per_key)
    kept = [request * width + row for request, count in enumerate(lens) for row in range(count)]
    expected, scratch = torch.zeros(5, width, HEADS, V_DIM, K_DIM), torch.zeros(5, width, HEADS, V_DIM, K_DIM)
    out = ops.delta_rule(qkv, g, beta, K_HEADS, states, whole, expected)[kept]
    parts = (part[kept].contiguous() for part in (qkv, g, beta))
    torch.testing.assert_close(ops.delta_rule(*parts, K_HEADS, states, some, scratch), out)
    for place, count in zip(whole.scratch.tolist(), lens, strict=True):
        torch.testing.assert_close(scratch[place, :count], expected[place, :count])
        assert not scratch[place, count:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_causal_conv_equals_its_specification(native_ops: Kernels, case: str, bias: bool, channels_last: bool) -> None:
    """Fails where a request reads another's inputs, or the last inputs are not kept, also in a pool of another
    layout."""
    lens, fresh, snapshots = CASES[case]
    rows = rows_of(lens, fresh=fresh, snapshots=snapshots)
    torch.manual_seed(3)
    x, states = torch.randn(sum(lens), CHANNELS), torch.randn(POOL, CHANNELS, TAPS - 1)
    weight, offset = torch.randn(CHANNELS, TAPS), torch.randn(CHANNELS) if bias else None
    expected_states = states.clone()
    if channels_last:
        states = states.mT.contiguous().mT
    expected = reference.causal_conv(x, weight, offset, expected_states, rows)
    out = native_ops.causal_conv(x, weight, offset, states, rows)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(states, expected_states)


@pytest.mark.parametrize("layout", ["own windows", "windows that share memory", "channels last"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_verified_windows_equal_decoded_states(ops: Kernels, width: int, state_dtype: torch.dtype, layout: str) -> None:
    """Fails where the window of a verified row is not the state that a decode step would leave, or a row reads more of
    the inputs before it than the pool would have kept."""
    batch, keep = 3, TAPS - 1
    torch.manual_seed(2)
    rows = replace(rows_of([width] * batch), scratch=torch.tensor([2, 0, 3]))
    x, states = torch.randn(batch * width, CHANNELS), torch.randn(POOL, CHANNELS, keep).to(state_dtype)
    weight = torch.randn(CHANNELS, TAPS)
    if layout == "windows that share memory":
        memory = torch.zeros(5, CHANNELS, width + keep - 1, dtype=state_dtype)
        windows = memory.as_strided((5, width, CHANNELS, keep), (memory.stride(0), 1, memory.stride(1), 1))
    else:
        windows = torch.zeros(5, width, CHANNELS, keep, dtype=state_dtype)
    if layout == "channels last":
        states, windows = states.mT.contiguous().mT, windows.mT.contiguous().mT
    before = states.clone()
    out = ops.causal_conv(x, weight, None, states, rows, windows).view(batch, width, CHANNELS)
    assert torch.equal(states, before)
    for row in range(width):
        step = ops.causal_conv(x.view(batch, width, -1)[:, row], weight, None, states, rows_of([1] * batch))
        assert torch.equal(step, out[:, row])
        assert torch.equal(states[rows.slots], windows[rows.scratch, row])


def test_the_specification_is_that_of_qwen(ops: Kernels) -> None:
    """Fails where convolution, gates, delta rule or gated norm compute something else than transformers' Qwen3.5."""
    total = 77
    torch.manual_seed(4)
    x, weight = torch.randn(total, CHANNELS), torch.randn(CHANNELS, TAPS)
    rows = rows_of([total], fresh=(0,))
    conv = ops.causal_conv(x, weight, None, torch.zeros(POOL, CHANNELS, TAPS - 1), rows)
    expected = qwen.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    torch.testing.assert_close(conv, expected, rtol=1e-5, atol=1e-6)

    a, b, a_log, dt_bias = torch.randn(total, HEADS), torch.randn(total, HEADS), torch.randn(HEADS), torch.randn(HEADS)
    g, beta = ops.delta_gates(a, b, a_log, dt_bias)
    torch.testing.assert_close(g, -a_log.exp() * F.softplus(a + dt_bias))
    torch.testing.assert_close(beta, b.sigmoid())

    states = torch.zeros(POOL, HEADS, V_DIM, K_DIM)
    out = ops.delta_rule(conv, g, beta, K_HEADS, states, rows)
    q, k, v = conv.split([K_HEADS * K_DIM, K_HEADS * K_DIM, HEADS * V_DIM], dim=-1)
    q, k = (part.view(1, total, K_HEADS, K_DIM).repeat_interleave(HEADS // K_HEADS, 2) for part in (q, k))
    expected, last = qwen.torch_recurrent_gated_delta_rule(
        *(q, k, v.view(1, total, HEADS, V_DIM)),
        g=g[None],
        beta=beta[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[rows.slots[0]], last[0].mT, rtol=1e-4, atol=1e-5)

    norm = qwen.Qwen3_5RMSNormGated(V_DIM, eps=1e-6)
    norm.weight.data.normal_()
    gate = torch.randn_like(out)
    torch.testing.assert_close(ops.gated_rms_norm(out, gate, norm.weight, 1e-6), norm(out, gate), rtol=1e-5, atol=1e-6)


def test_the_specification_is_that_of_kimi(ops: Kernels) -> None:
    """Fails where gates, delta rule or gated norm compute something else than transformers' Kimi-Linear."""
    config = KimiLinearConfig(hidden_size=24, linear_head_dim=V_DIM, linear_num_heads=HEADS)
    gate = kimi.KimiLinearForgetGate(config)
    for weight in gate.parameters():
        torch.nn.init.normal_(weight)
    hidden = torch.randn(1, 77, 24)
    a = gate.f_b_proj(gate.f_a_proj(hidden))[0].view(77, HEADS, V_DIM)
    g, beta = ops.delta_gates(a, torch.zeros(77, HEADS), gate.A_log, gate.dt_bias)
    torch.testing.assert_close(g, gate(hidden)[0], rtol=1e-5, atol=1e-6)
    assert (beta == 0.5).all()
    empty, _ = ops.delta_gates(a[:0], torch.zeros(0, HEADS), gate.A_log, gate.dt_bias)
    assert empty.shape == (0, HEADS, V_DIM)

    x, z, weight = torch.randn(77, HEADS, V_DIM), torch.randn(77, HEADS, V_DIM), torch.randn(V_DIM)
    expected = F.rms_norm(x, (V_DIM,), weight, 1e-6) * z.sigmoid()
    torch.testing.assert_close(ops.gated_rms_norm(x, z, weight, 1e-6, False), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuts", [[1] * 21, [4, 17], [20, 1]])
def test_native_bits_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    """Fails where a prefix hit, a chunk of a prompt or a decode step gives other bits than the whole prompt at once."""
    if native.isa() is None:
        pytest.skip("the native ops are not built")
    ops, total = choose_kernels(torch.float32), sum(cuts)
    qkv, g, beta, states = inputs(total)
    weight, conv_states = torch.randn(CHANNELS, TAPS), torch.randn(POOL, CHANNELS, TAPS - 1)
    whole_conv_states, whole_states = conv_states.clone(), states.clone()
    x = ops.causal_conv(qkv, weight, None, whole_conv_states, rows_of([total]))
    out = ops.delta_rule(x, g, beta, K_HEADS, whole_states, rows_of([total]))
    parts = []
    for part in zip(*(each.split(cuts) for each in (qkv, g, beta)), strict=True):
        rows = rows_of([len(part[0])])
        x = ops.causal_conv(part[0], weight, None, conv_states, rows)
        parts.append(ops.delta_rule(x, *part[1:], K_HEADS, states, rows))
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(states, whole_states) and torch.equal(conv_states, whole_conv_states)


def test_native_bfloat16_is_as_exact_as_torch() -> None:
    """Fails where bfloat16 rows lose more than the rounding of inputs and outputs."""
    if native.isa() is None:
        pytest.skip("the native ops are not built")
    ops = choose_kernels(torch.bfloat16)
    qkv, g, beta, states = inputs(9, dtype=torch.bfloat16)
    rows = rows_of([4, 5], fresh=(1,))
    expected = reference.delta_rule(qkv, g, beta, K_HEADS, states.clone(), rows)
    torch.testing.assert_close(ops.delta_rule(qkv, g, beta, K_HEADS, states, rows), expected, rtol=1e-2, atol=1e-2)
    weight, windows = torch.randn(CHANNELS, TAPS).bfloat16(), torch.randn(POOL, CHANNELS, TAPS - 1).bfloat16()
    expected = reference.causal_conv(qkv, weight, None, windows.clone(), rows)
    torch.testing.assert_close(ops.causal_conv(qkv, weight, None, windows, rows), expected, rtol=1e-2, atol=1e-2)
    gate = torch.randn(9, HEADS, 2 * V_DIM).bfloat16()[..., V_DIM:]
    x, norm = torch.randn(9, HEADS, V_DIM).bfloat16(), torch.randn(V_DIM).bfloat16()
    expected = reference.gated_rms_norm(x, gate, norm, 1e-6)
    torch.testing.assert_close(ops.gated_rms_norm(x, gate, norm, 1e-6), expected, rtol=1e-2, atol=1e-2)

"""The specification of the ops of layers with recurrent state: causal convolution, gated delta rule, selective scan,
gated norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

L2_EPS = 1e-6  # of the norm of queries and keys (transformers' `l2norm`)


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a forward and where the state of each request is. Request b has the rows
    `row_starts[b] : row_starts[b + 1]`; without rows, its state stays as it is.

    Fields:
        slots: [B] int64; the requests' places in the pools of states. No slot occurs twice.
        row_starts: [B + 1] int64.
        fresh: [B] bool; the request begins, so its state is zero whatever its slot holds.
        scratch: [B] int64 in a verification: the state after each row goes to this place of the scratch, and the pool
            stays as it is. None otherwise: the state after the last row replaces the one in the pool.
        snapshot_rows: [B] int64; after so many rows of the request, its state is copied to `snapshot_slots` as well,
            for the prefix cache. -1: never. None: no request has one.
        snapshot_slots: [B] int64, or None.
    """

    slots: torch.Tensor
    row_starts: torch.Tensor
    fresh: torch.Tensor
    scratch: torch.Tensor | None = None
    snapshot_rows: torch.Tensor | None = None
    snapshot_slots: torch.Tensor | None = None

    @property
    def fields(self) -> tuple[torch.Tensor | None, ...]:
        """The fields in the order of the native ops' arguments."""
        return self.slots, self.row_starts, self.fresh, self.scratch, self.snapshot_rows, self.snapshot_slots

    def snapshot(self, request: int) -> tuple[int, int]:
        """Rows and slot of a request's snapshot; rows are -1 where it has none."""
        if self.snapshot_rows is None or self.snapshot_slots is None:
            return -1, -1
        return int(self.snapshot_rows[request]), int(self.snapshot_slots[request])


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    windows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Depthwise causal convolution over each request's rows, then SiLU. Its state is the last inputs of a request.

    Args:
        x: [T, C].
        weight: [C, N]; the last column belongs to the row itself.
        bias: [C] or None.
        states: [S, C, N - 1], oldest first; of any strides.
        windows: [P, W, C, N - 1], in a verification: `windows[rows.scratch[b], i]` becomes the state after row i. It
            may be a view in which the windows of two rows share memory.

    Returns:
        [T, C] in `x`'s dtype; sums are in float32.
    """
    out = torch.empty_like(x)
    keep = weight.shape[1] - 1
    starts = rows.row_starts.tolist()
    for request, slot in enumerate(rows.slots.tolist()):
        span = slice(starts[request], starts[request + 1])
        count = span.stop - span.start
        if count == 0:
            continue
        before = torch.zeros_like(states[slot]) if rows.fresh[request] else states[slot]
        inputs = torch.cat((before.to(x.dtype), x[span].T), dim=1)  # [C, N - 1 + count]
        out[span] = conv_taps(inputs, weight, bias, None if windows is None else states.dtype).T
        snapshot_row, snapshot_slot = rows.snapshot(request)
        if snapshot_row >= 0:
            states[snapshot_slot] = inputs[:, snapshot_row : snapshot_row + keep]
        if windows is None:
            states[slot] = inputs[:, count:]
        else:
            assert rows.scratch is not None
            for row in range(count):
                windows[int(rows.scratch[request]), row] = inputs[:, row + 1 : row + 1 + keep]
    return out


def conv_taps(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state_dtype: torch.dtype | None
) -> torch.Tensor:
    """The convolution of `causal_conv` as a sum over its taps, oldest first, then SiLU.

    Args:
        inputs: [..., C, N - 1 + rows].
        state_dtype: of the pool, in a verification: a row then reads the inputs before it as decoding would, which has
            stored them. None: as they are.

    Returns:
        [..., C, rows] in the inputs' dtype.
    """
    taps = weight.shape[1]
    rows = inputs.shape[-1] - taps + 1
    stored = inputs if state_dtype is None else inputs.to(state_dtype)
    sums = torch.zeros_like(inputs[..., :rows], dtype=torch.float32)
    if bias is not None:
        sums += bias.float()[:, None]
    for tap in range(taps):
        source = inputs if tap == taps - 1 else stored
        sums += weight[:, tap, None].float() * source[..., tap : tap + rows].float()
    return F.silu(sums).to(inputs.dtype)


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay and learning rate of the gated delta rule (arXiv 2412.06464), or of Kimi delta attention (arXiv
    2510.26692), whose decay is one for each key dimension.

    Args:
        a: [T, H], or [T, H, K] for a decay for each key dimension.
        b: [T, H].
        a_log: H elements.
        dt_bias: as many elements as a row of `a`.

    Returns:
        g: of `a`'s shape, float32, the logarithm of the decay, at most 0. beta: [T, H] float32.
    """
    rate = a_log.float().exp().view(-1, *[1] * (a.dim() - 2))
    g = -rate * F.softplus(a.float() + dt_bias.float().view(a.shape[1:]))
    return g, b.float().sigmoid()


def delta_rule(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    num_k_heads: int,
    states: torch.Tensor,
    rows: StateRows,
    scratch_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gated delta rule, row by row, in float32. Per value head, with state S [V, K], normalised k and scaled q:

        S <- exp(g) S;   S <- S + beta (v - S k) k^T;   out = S q

    Args:
        qkv: [T, 2 * Hk * K + H * V]; all queries, all keys, all values. Value heads h share the key head
            h // (H / Hk).
        g: [T, H] float32 (gated delta rule), or [T, H, K] (Kimi delta attention: a decay for each key dimension).
        beta: [T, H] float32.
        states: [S, H, V, K].
        scratch_states: [P, W, H, V, K], in a verification: `scratch_states[rows.scratch[b], i]` becomes the state
            after row i. The next row reads it from there, in the pool's dtype, as decoding would.

    Returns:
        [T, H, V] in `qkv`'s dtype.
    """
    _, heads, v_dim, k_dim = states.shape
    q, k, v = split_heads(qkv, num_k_heads, heads, k_dim, v_dim)
    out = qkv.new_empty(len(qkv), heads, v_dim)

    def step(state: torch.Tensor, row: int) -> torch.Tensor:
        state, out[row] = delta_step(state, q[row], k[row], v[row], g[row], beta[row], out.dtype)
        return state

    _row_by_row(step, states, rows, scratch_states)
    return out


def _row_by_row(
    step: Callable[[torch.Tensor, int], torch.Tensor],
    states: torch.Tensor,
    rows: StateRows,
    scratch_states: torch.Tensor | None,
) -> None:
    """Advances each request's state over its rows, by `step(state before, row) -> state after`, in float32."""
    starts = rows.row_starts.tolist()
    for request, slot in enumerate(rows.slots.tolist()):
        if starts[request] == starts[request + 1]:
            continue
        state = torch.zeros_like(states[slot], dtype=torch.float32) if rows.fresh[request] else states[slot].float()
        snapshot_row, snapshot_slot = rows.snapshot(request)
        for place, row in enumerate(range(starts[request], starts[request + 1])):
            if place == snapshot_row:
                states[snapshot_slot] = state.to(states.dtype)
            state = step(state, row)
            if scratch_states is not None:
                assert rows.scratch is not None
                stored = state.to(states.dtype)
                scratch_states[int(rows.scratch[request]), place] = stored
                state = stored.float()
        if starts[request + 1] - starts[request] == snapshot_row:
            states[snapshot_slot] = state.to(states.dtype)
        if scratch_states is None:
            states[slot] = state.to(states.dtype)


def split_heads(
    qkv: torch.Tensor, num_k_heads: int, heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k, normalised, q also scaled by K^-0.5, and v; each [T, H, ...] float32, key heads repeated."""
    q, k, v = torch.split(qkv.float(), [num_k_heads * k_dim, num_k_heads * k_dim, heads * v_dim], dim=-1)
    q, k = (_l2_norm(x.reshape(-1, num_k_heads, k_dim)) for x in (q, k))
    q, k = (x.repeat_interleave(heads // num_k_heads, dim=1) for x in (q * k_dim**-0.5, k))
    return q, k, v.reshape(-1, heads, v_dim)


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def delta_step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of `delta_rule` for any number of requests: the state after it, and its output in `dtype`.

    Args:
        state: [..., H, V, K] float32; q, k: [..., H, K]; v: [..., H, V]; g: [..., H] or [..., H, K]; beta: [..., H].
    """
    decay = g.exp()[..., None, None] if g.dim() == beta.dim() else g.exp()[..., None, :]
    state = state * decay
    seen = (state * k[..., None, :]).sum(-1)  # [..., H, V]
    state = state + (beta[..., None] * (v - seen))[..., None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(-1).to(dtype)


def selective_scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    num_groups: int,
    states: torch.Tensor,
    rows: StateRows,
    scratch_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """The selective state space of Mamba-2 (arXiv 2405.21060, section 2), row by row, in float32. Per head, with state
    S [P, N], input x [P], and b and c [N] of the head's group:

        step = softplus(dt + dt_bias);   S <- exp(step a) S + step x b^T;   out = S c + skip x

    Args:
        xbc: [T, H * P + 2 * G * N]; all inputs, all b, all c. Heads h share the group h // (H / G).
        dt: [T, H].
        a, dt_bias, skip: [H]; `a` is at most 0.
        num_groups: G.
        states: [S, H, P, N].
        scratch_states: [P, W, H, P, N], in a verification, as in `delta_rule`.

    Returns:
        [T, H, P] in `xbc`'s dtype.
    """
    _, heads, head_dim, state_dim = states.shape
    x, b, c = split_groups(xbc, num_groups, heads, head_dim, state_dim)
    sizes, decays = scan_gates(dt, a, dt_bias)
    out = xbc.new_empty(len(xbc), heads, head_dim)

    def step(state: torch.Tensor, row: int) -> torch.Tensor:
        state, out[row] = scan_step(state, x[row], b[row], c[row], sizes[row], decays[row], skip, out.dtype)
        return state

    _row_by_row(step, states, rows, scratch_states)
    return out


def split_groups(
    xbc: torch.Tensor, num_groups: int, heads: int, head_dim: int, state_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H, P], b and c [T, H, N], all float32, groups repeated."""
    size = num_groups * state_dim
    x, b, c = torch.split(xbc.float(), [heads * head_dim, size, size], dim=-1)
    b, c = (y.reshape(-1, num_groups, state_dim).repeat_interleave(heads // num_groups, dim=1) for y in (b, c))
    return x.reshape(-1, heads, head_dim), b, c


def scan_gates(dt: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Step sizes and decays of `selective_scan`; each [T, H] float32. They are computed in float64 and rounded: torch's
    vector and scalar functions differ in the last bits, and which of them takes a row depends on the other rows."""
    steps = F.softplus(dt.double() + dt_bias.double()).float()
    return steps, (steps.double() * a.double()).exp().float()


def scan_step(
    state: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    size: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of `selective_scan` for any number of requests: the state after it, and its output in `dtype`.

    Args:
        state: [..., H, P, N] float32; x: [..., H, P]; b, c: [..., H, N]; size, decay: [..., H]; skip: [H].
    """
    state = state * decay[..., None, None] + (size[..., None] * x)[..., None] * b[..., None, :]
    return state, ((state * c[..., None, :]).sum(-1) + skip.float()[:, None] * x).to(dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    silu: bool = True,
    gate_first: bool = False,
) -> torch.Tensor:
    """RMS norm over the last dimension, times `silu(gate)`; float32 inside, returned in `x`'s dtype.

    Args:
        x, gate: [..., D].
        weight: [D]; or [H, D] for x [T, H, D], one for each group of a norm in groups.
        silu: False: times `sigmoid(gate)` instead.
        gate_first: the norm is that of the product of x and the gate, as in Mamba-2.
    """
    opened = (F.silu if silu else torch.sigmoid)(gate.float())
    wide = x.float() * opened if gate_first else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed if gate_first else normed * opened).to(x.dtype)

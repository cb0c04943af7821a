"""Torch and native bodies of the ops of layers with recurrent state."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_dflash.ops import recurrent_reference as reference
from sglang_dflash.ops.recurrent_reference import StateRows

CHUNK = 64  # rows whose products are taken together


def delta_rule(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    num_k_heads: int,
    states: torch.Tensor,
    rows: StateRows,
    scratch_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.delta_rule`: steps of all requests together where each has the same few rows, else chunk by chunk."""
    width = _few_rows(rows, len(qkv), scratch_states is not None)
    if width is None and scratch_states is not None:
        return reference.delta_rule(qkv, g, beta, num_k_heads, states, rows, scratch_states)
    if width is None:
        return _by_request(qkv, g, beta, num_k_heads, states, rows)
    _, heads, v_dim, k_dim = states.shape
    parts = (*reference.split_heads(qkv, num_k_heads, heads, k_dim, v_dim), g, beta)
    q, k, v, g, beta = (part.view(len(rows.slots), width, *part.shape[1:]) for part in parts)
    out = qkv.new_empty(len(rows.slots), width, heads, v_dim)

    def step(state: torch.Tensor, row: int) -> torch.Tensor:
        state, out[:, row] = reference.delta_step(
            state, q[:, row], k[:, row], v[:, row], g[:, row], beta[:, row], out.dtype
        )
        return state

    _together(step, states, rows, width, scratch_states)
    return out.flatten(0, 1)


def _few_rows(rows: StateRows, total: int, verifies: bool) -> int | None:
    """How many rows each request has, if it is the same for all and all are a decode or a verification; else None."""
    batch = len(rows.slots)
    width = total // batch if batch else 0
    if rows.snapshot_rows is None and (verifies or width <= 1) and bool((rows.row_starts.diff() == width).all()):
        return width
    return None


def _together(
    step: Callable[[torch.Tensor, int], torch.Tensor],
    states: torch.Tensor,
    rows: StateRows,
    width: int,
    scratch_states: torch.Tensor | None,
) -> None:
    """Advances the states of all requests over `width` rows, by `step(states before, place) -> states after`."""
    if width == 0:
        return
    state = states[rows.slots].float()
    state[rows.fresh] = 0
    for row in range(width):
        state = step(state, row)
        if scratch_states is not None:
            stored = state.to(states.dtype)
            scratch_states[rows.scratch, row] = stored
            state = stored.float()
    if scratch_states is None:
        states[rows.slots] = state.to(states.dtype)


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
    """`reference.selective_scan`: steps of all requests together where each has the same few rows. A prompt goes row by
    row, slowly, so that a row's bits do not depend on how the prompt is cut."""
    width = _few_rows(rows, len(xbc), scratch_states is not None)
    if width is None:
        return reference.selective_scan(xbc, dt, a, dt_bias, skip, num_groups, states, rows, scratch_states)
    _, heads, head_dim, state_dim = states.shape
    parts = (
        *reference.split_groups(xbc, num_groups, heads, head_dim, state_dim),
        *reference.scan_gates(dt, a, dt_bias),
    )
    x, b, c, sizes, decays = (part.view(len(rows.slots), width, *part.shape[1:]) for part in parts)
    out = xbc.new_empty(len(rows.slots), width, heads, head_dim)

    def step(state: torch.Tensor, row: int) -> torch.Tensor:
        state, out[:, row] = reference.scan_step(
            state, x[:, row], b[:, row], c[:, row], sizes[:, row], decays[:, row], skip, out.dtype
        )
        return state

    _together(step, states, rows, width, scratch_states)
    return out.flatten(0, 1)


def _by_request(
    qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, num_k_heads: int, states: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    _, heads, v_dim, k_dim = states.shape
    q, k, v = reference.split_heads(qkv, num_k_heads, heads, k_dim, v_dim)
    out = qkv.new_empty(len(qkv), heads, v_dim)
    starts = rows.row_starts.tolist()
    for request, slot in enumerate(rows.slots.tolist()):
        first, last = starts[request], starts[request + 1]
        if first == last:
            continue
        state = torch.zeros_like(states[slot], dtype=torch.float32) if rows.fresh[request] else states[slot].float()
        snapshot_row, snapshot_slot = rows.snapshot(request)
        cuts = [first + snapshot_row] if snapshot_row >= 0 else []
        for begin, end in zip([first, *cuts], [*cuts, last], strict=True):
            for chunk in range(begin, end, CHUNK):
                span = slice(chunk, min(end, chunk + CHUNK))
                state, some = _chunk(state, q[span], k[span], v[span], g[span], beta[span])
                out[span] = some.to(out.dtype)
            if cuts and end == cuts[0]:
                states[snapshot_slot] = state.to(states.dtype)
        states[slot] = state.to(states.dtype)
    return out


def _chunk(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one chunk by matrix products instead of row by row (arXiv 2412.06464, section 3.3).

    With c_i the sum of g up to row i and u_i = beta_i (v_i - S_i k_i), the updates solve a triangular system:
    u_i + beta_i sum_{j<i} (k_i^T D_ij k_j) u_j = beta_i (v_i - S_0 D_i k_i), where D decays by exp(c_i - c_j).

    Args:
        state: [H, V, K]; the others [n, H, ...] as in `reference.delta_step`.

    Returns:
        The state after the chunk, and [n, H, V].
    """
    rows = len(q)
    q, k, v, beta = (part.transpose(0, 1) for part in (q, k, v, beta))  # [H, n, ...]
    total = (g if g.dim() == 3 else g[..., None]).cumsum(0).transpose(0, 1)  # [H, n, K] or [H, n, 1]
    lower = torch.ones(rows, rows, dtype=torch.bool).tril()
    # Pairs behind the diagonal are masked before the exponential, which would overflow.
    pairs = (total[:, :, None] - total[:, None]).masked_fill(~lower[..., None], float("-inf")).exp()  # [H, n, n, *]
    if pairs.shape[-1] == 1:
        k_k, q_k = (k @ k.mT) * pairs[..., 0], (q @ k.mT) * pairs[..., 0]
    else:
        decayed = pairs * k[:, None]
        k_k, q_k = torch.einsum("hik,hijk->hij", k, decayed), torch.einsum("hik,hijk->hij", q, decayed)
    from_start = total.exp()
    seen = (k * from_start) @ state.mT  # [H, n, V]
    system = (beta[..., None] * k_k).tril(-1)
    updates = torch.linalg.solve_triangular(system, beta[..., None] * (v - seen), upper=False, unitriangular=True)
    out = (q * from_start) @ state.mT + q_k @ updates
    to_end = (total[:, -1:] - total).exp()
    state = state * from_start[:, -1:] + updates.mT @ (k * to_end)
    return state, out.transpose(0, 1)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    windows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.causal_conv`, all requests together where each has the same number of rows."""
    batch, keep = len(rows.slots), weight.shape[1] - 1
    width = len(x) // batch if batch else 0
    if width == 0 or rows.snapshot_rows is not None or not bool((rows.row_starts.diff() == width).all()):
        return reference.causal_conv(x, weight, bias, states, rows, windows)
    before = states[rows.slots].masked_fill(rows.fresh[:, None, None], 0)
    inputs = torch.cat((before.to(x.dtype), x.view(batch, width, -1).mT), dim=2)  # [B, C, N - 1 + width]
    stored = inputs.to(states.dtype)
    if windows is None:
        states[rows.slots] = stored[:, :, width:]
    else:
        assert rows.scratch is not None
        for row in range(width):  # one by one, because the windows of two rows may share memory
            windows[:, row][rows.scratch] = stored[:, :, row + 1 : row + 1 + keep]
    state_dtype = None if windows is None else states.dtype
    return reference.conv_taps(inputs, weight, bias, state_dtype).mT.flatten(0, 1)


def native_causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    windows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.causal_conv` in one native call."""
    out: torch.Tensor = torch.ops.sglang_dflash.causal_conv(x, weight, bias, states, *rows.fields, windows)
    return out


def native_delta_rule(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    num_k_heads: int,
    states: torch.Tensor,
    rows: StateRows,
    scratch_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.delta_rule` in one native call, row by row: a request's bits do not depend on how its rows are cut
    into forwards, so that a cached prefix, a chunk or a verified block gives the bits of plain decoding."""
    out: torch.Tensor = torch.ops.sglang_dflash.delta_rule(
        qkv, g, beta, num_k_heads, states, *rows.fields, scratch_states
    )
    return out


def native_selective_scan(
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
    """`reference.selective_scan` in one native call, row by row as `native_delta_rule`."""
    out: torch.Tensor = torch.ops.sglang_dflash.selective_scan(
        xbc, dt, a, dt_bias, skip, num_groups, states, *rows.fields, scratch_states
    )
    return out

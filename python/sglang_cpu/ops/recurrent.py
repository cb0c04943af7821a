"""The native bodies of the ops of layers with recurrent state."""

from __future__ import annotations

import torch

from sglang_cpu.ops.recurrent_reference import StateRows


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    windows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.causal_conv` in one native call."""
    out: torch.Tensor = torch.ops.sglang_cpu.causal_conv(x, weight, bias, states, *rows.fields, windows)
    return out


def delta_rule(
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
    out: torch.Tensor = torch.ops.sglang_cpu.delta_rule(qkv, g, beta, num_k_heads, states, *rows.fields, scratch_states)
    return out


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
    """`reference.selective_scan` in one native call, row by row as `delta_rule`."""
    out: torch.Tensor = torch.ops.sglang_cpu.selective_scan(
        xbc, dt, a, dt_bias, skip, num_groups, states, *rows.fields, scratch_states
    )
    return out

"""SGLang's kernels of the ring of updates, interpreted: verification, cursors and commits, against states of all rows.

Run by test_state_ring.py, in a process where Triton interprets its kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from sglang.kernels.ops.mamba import mamba_state_scatter_triton
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

sys.path.append(str(Path(__file__).parents[1] / "host"))
from state_ring_rig import BLOCK, DIM, HEADS, KEY_HEADS, Arm, compare, plain_rule

from sglang_cpu import state_ring
from sglang_cpu.ops import StateRows

STEPS = 18  # of about a second


def triton_rule(
    arm: Arm,
    layer: int,
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    rows: StateRows,
    requests: torch.Tensor,
) -> torch.Tensor:
    """By SGLang's own backend."""
    q, k, v = qkv.split([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM], dim=-1)
    return GDNAttnBackend._replayssm_target_verify(
        None,
        layer=arm.layers[layer],
        query=q.reshape(1, -1, KEY_HEADS, DIM),
        key=k.reshape(1, -1, KEY_HEADS, DIM),
        value=v.reshape(1, -1, HEADS, DIM),
        a=gates[0],
        b=gates[1],
        mamba_pool=arm.pool.mamba_pool,
        layer_cache=arm.pool.mamba2_layer_cache(layer),
        cache_indices=rows.slots.int(),
        replay_indices=requests,
        query_start_loc=rows.row_starts.int(),
        draft_token_num=int(rows.row_starts.diff().max()),
    )[0]


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as integers of 16 bits, and multiplies those."""
    original = InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(builder, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("length", [16, 32])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 3e-2)])
def test_rings_are_states_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, length: int
) -> None:
    """Fails where a kernel loses an update, a cursor is moved by other rows than the accepted ones, a step of few rows
    leaves no room for a whole block, or a snapshot is of another row."""
    monkeypatch.setattr(mamba_state_scatter_triton, "fused_conv_window_scatter_with_mask", state_ring.store_windows)
    ring, plain = Arm(length, triton_rule, dtype, length), Arm(None, plain_rule, dtype, length)
    most, wrapped = compare(monkeypatch, ring, plain, length, STEPS, ragged=False, tolerance=tolerance)
    assert wrapped and (most > 0) == (length > 2 * BLOCK)

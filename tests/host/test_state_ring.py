"""Rings of updates on a CPU: every state, snapshot and output is that of states of all rows; and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode
from sglang.kernels.ops.mamba import mamba_state_scatter_triton
from sglang.srt.configs import Qwen3NextConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from state_ring_rig import BLOCK, Arm, compare, plain_rule

from sglang_cpu import recurrent
from sglang_cpu import state_ring as bodies
from sglang_cpu.ops import StateRows
from sglang_dflash.host.worker import recurrent_state, state_ring


def cpu_rule(
    arm: Arm,
    layer: int,
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    rows: StateRows,
    requests: torch.Tensor,
) -> torch.Tensor:
    """By the CPU platform's backend."""
    backend = recurrent.CpuGatedDeltaBackend.__new__(recurrent.CpuGatedDeltaBackend)
    backend.req_to_token_pool, backend._kernels = arm.pool, arm.kernels
    backend._rows, backend._ring_rows = rows, requests
    made, cache = arm.layers[layer], arm.pool.mamba2_layer_cache(layer)
    gates = arm.kernels.delta_gates(*gates, made.A_log, made.dt_bias)
    return backend._delta_rule(qkv, gates, made, cache.temporal, cache.intermediate_ssm)


@pytest.fixture
def cpu_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of the CPU platform, in place."""
    monkeypatch.setattr(gdn_replayssm_spec_decode, "commit_gdn_replayssm_spec", bodies.advance)
    monkeypatch.setattr(gdn_replayssm_spec_decode, "commit_gdn_replayssm_circular", bodies.store)
    monkeypatch.setattr(mamba_state_scatter_triton, "fused_conv_window_scatter_with_mask", bodies.store_windows)


@pytest.mark.usefixtures("cpu_commit")
@pytest.mark.parametrize("ragged", [False, True], ids=["equal widths", "any rows"])
@pytest.mark.parametrize("length", [16, 32, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_rings_are_states_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, length: int, ragged: bool
) -> None:
    """Fails where an update is lost, is another request's, or outlives its request; where a step of few rows leaves no
    room for a whole block; or a short ring keeps updates beyond a commit."""
    for seed in range(4):
        ring, plain = Arm(length, cpu_rule, dtype, seed), Arm(None, plain_rule, dtype, seed)
        most, wrapped = compare(monkeypatch, ring, plain, seed, 60, ragged=ragged, tolerance=tolerance)
        assert wrapped and most <= max(0, length - 2 * BLOCK)
        assert (most > 0) == state_ring.lags(config_of(linear_replayssm_cache_len=length), BLOCK)


def test_a_request_begins_with_an_empty_ring() -> None:
    """Fails where a request continues the ring that the last step of its row's former request has moved on."""
    arm = Arm(64, cpu_rule, torch.float32)
    pool = arm.pool.mamba_pool
    for cursors in (pool.replayssm_spec_write_pos, pool.replayssm_cache_base, pool.replayssm_is_flush):
        cursors.fill_(3)
    arm.states.begin(SimpleNamespace(req_pool_indices=torch.tensor([1, 3])))
    assert pool.replayssm_spec_write_pos.tolist() == [3, 0, 3, 0, 3]
    assert pool.replayssm_cache_base.tolist() == pool.replayssm_is_flush.tolist() == [3, 0, 3, 0, 3]
    Arm(None, plain_rule, torch.float32).states.begin(SimpleNamespace(req_pool_indices=torch.tensor([1])))


def test_pools_are_given_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where SGLang's refusal of a ring beside DFLASH reaches our worker, or it no longer refuses its own."""
    raise NotImplementedError


GATED = SimpleNamespace(hf_config=Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"]))


def config_of(**asked: Any) -> SimpleNamespace:
    """Server arguments of a start that is allowed, but for those that are given."""
    allowed = {
        "enable_linear_replayssm_spec": True,
        "linear_replayssm_cache_len": 16,
        "mamba_ssm_dtype": "float32",
        "mamba_radix_cache_strategy": "extra_buffer",
        "disable_radix_cache": False,
        "enable_mixed_chunk": False,
        "disaggregation_mode": "null",
        "disaggregation_decode_retraction_backup": "none",
    }
    return SimpleNamespace(**allowed | asked)

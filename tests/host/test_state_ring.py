"""Rings of updates on a CPU: every state, snapshot and output is that of states of all rows; and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode
from sglang.kernels.ops.mamba import mamba_state_scatter_triton
from sglang.srt.configs import KimiLinearConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative import spec_utils
from stand_in_worker import BATCH, COLUMNS, decode_batch, prefill_batch, worker_of
from stand_ins import configured, make_sampler, one_rank
from state_ring_rig import (
    BLOCK,
    CHANNELS,
    CONFIG,
    DIM,
    GRID,
    HEADS,
    KEY_HEADS,
    REQUESTS,
    TAPS,
    Arm,
    compare,
    plain_rule,
)
from transformers import Qwen3Config

from sglang_cpu import recurrent
from sglang_cpu import state_ring as bodies
from sglang_cpu.ops import StateRows
from sglang_dflash import ops
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
    for seed in range(2):
        ring, plain = Arm(length, cpu_rule, dtype, seed), Arm(None, plain_rule, dtype, seed)
        most, wrapped = compare(monkeypatch, ring, plain, seed, 40, ragged=ragged, tolerance=tolerance)
        assert wrapped and most <= max(0, length - 2 * BLOCK)
        assert (most > 0) == state_ring.lags(config_of(linear_replayssm_cache_len=length), BLOCK)


@pytest.mark.usefixtures("cpu_commit")
def test_the_backend_writes_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a layer's forward in a verification asks for scratch that a server with rings does not have, or
    writes other requests' rings; the rows after the first commit need what it wrote."""
    monkeypatch.setattr(spec_utils, "mamba_track_grid", lambda page_size: GRID)
    arms = [Arm(32, cpu_rule, torch.float32), Arm(None, plain_rule, torch.float32)]
    generator = torch.Generator().manual_seed(5)
    state, inputs = torch.randn(2, HEADS, DIM, DIM, generator=generator), torch.randn(2, CHANNELS, TAPS - 1)
    drawn = torch.randn(2, 2 * BLOCK, CHANNELS + 2 * HEADS, generator=generator)
    outputs = []
    for arm in arms:
        requests = torch.tensor([arm.start(state, inputs, 5) for _ in range(3)])[1:]
        backend = recurrent.CpuGatedDeltaBackend.__new__(recurrent.CpuGatedDeltaBackend)
        backend.req_to_token_pool, backend._kernels, backend._kimi = arm.pool, arm.kernels, False
        spec_info = SimpleNamespace(draft_token_num=BLOCK)
        batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, req_pool_indices=requests, spec_info=spec_info)
        for each in drawn:
            backend.init_forward_metadata(batch)
            arm._slots = backend.state_slots
            qkv, a, b = each.split([CHANNELS, HEADS, HEADS], dim=-1)
            for layer in arm.layers:
                layer.bias = None
                outputs.append(
                    backend.forward_extend(layer=layer, forward_batch=batch, mixed_qkv=qkv.contiguous(), a=a, b=b)
                )
            arm.states.commit(arm._batch(requests), torch.tensor([3, BLOCK], dtype=torch.int32))
            arm.lens[requests] += torch.tensor([3, BLOCK])
    with_rings, plain = torch.stack(outputs).chunk(2)
    torch.testing.assert_close(with_rings, plain, rtol=1e-4, atol=1e-4)
    assert arms[0].pool.mamba_pool.replayssm_spec_write_pos[requests].tolist() == [6, 16]


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


def test_when_the_worker_begins_and_commits() -> None:
    """Fails where requests meet a ring that was not emptied before their first step, from a prompt or another server;
    or where a step publishes before its states are committed."""
    with configured(), one_rank():
        table = torch.arange(BATCH * COLUMNS, dtype=torch.int32).view(BATCH, COLUMNS)
        worker, calls = worker_of(table, ops.choose_kernels("cpu", torch.float32), make_sampler()), list[str]()
        _run_steps(worker, calls)
    assert calls == ["begin", "target", "publish", "target", "commit", "publish", "begin"]


def _run_steps(worker: Any, calls: list[str]) -> None:
    """A prefill, a decode, and requests that another server has prefilled."""
    forward = worker._target_worker.forward_batch_generation

    def target(*args: Any, **kwargs: Any) -> Any:
        calls.append("target")
        return forward(*args, **kwargs)

    worker._target_worker.forward_batch_generation = target
    worker._recurrent_state = SimpleNamespace(
        begin=lambda batch: calls.append("begin"), commit=lambda batch, lens: calls.append("commit")
    )
    worker.forward_batch_generation(prefill_batch(), lambda lens: calls.append("publish"))
    worker.forward_batch_generation(decode_batch(), lambda lens: calls.append("publish"))
    received = decode_batch()
    received.spec_info = SimpleNamespace(bonus_tokens=received.seq_lens, new_seq_lens=received.seq_lens)
    received.spec_info.future_indices = None
    worker.receive(received)


def test_pools_are_given_rings() -> None:
    """Fails where SGLang's refusal of a ring beside DFLASH reaches our worker, its pool gets no ring, the algorithm has
    another name afterwards, or SGLang no longer refuses."""
    configurator = SimpleNamespace(
        hybrid_kda_config=None,
        hybrid_gdn_config=CONFIG,
        model_config=SimpleNamespace(context_len=64),
        device="cpu",
        mambaish_config=SimpleNamespace(mamba2_cache_params=Arm(None, plain_rule, torch.float32).cache_params),
        layer_info=SimpleNamespace(start_layer=0),
        _get_mamba_layer_ids_for_req_pool=lambda: [0, 1],
        _get_ple_req_pool_kwargs=dict,
    )
    original, sizes = KVCacheConfigurator._build_hybrid_req_pool, {"max_num_reqs": 4, "extra_max_context_len": 8}
    asked = {"enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": 32, "max_mamba_cache_size": 20}
    asked |= {"speculative_num_draft_tokens": BLOCK, "speculative_eagle_topk": 1}
    with configured(**asked):
        with pytest.raises(ValueError, match="requires a KDA model"):
            original(configurator, **sizes)
        cache = state_ring._with_ring(original, configurator, **sizes).mamba_pool.mamba_cache
        assert cache.intermediate_ssm is None and cache.replayssm_d.shape == (2, 5, 4, 32, 32)
        assert get_spec().speculative_algorithm == "DFLASH"
    with configured(**asked, speculative_algorithm="DSPARK"), pytest.raises(ValueError, match="requires a KDA model"):
        state_ring._with_ring(original, configurator, **sizes)


GATED = SimpleNamespace(hf_config=CONFIG, linear_attn_registry_result=None)


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
        "disaggregation_decode_retraction_backup": "cpu_tensor",
    }
    return SimpleNamespace(**allowed | asked)


NO_BUFFER = {"mamba_radix_cache_strategy": "no_buffer"}
DECODES = {"disaggregation_mode": "decode"}


@pytest.mark.parametrize(
    ("block_size", "asked", "words"),
    [
        (
            8,
            {"linear_replayssm_cache_len": 8},
            "--linear-replayssm-cache-len is 8; allowed: a power of two of at least 16",
        ),
        (8, {"linear_replayssm_cache_len": 24}, "is 24; allowed: a power of two of at least 16"),
        (32, {}, "is 16; allowed: a power of two of at least 32, because a step writes 32 rows"),
        (
            8,
            {"linear_replayssm_cache_len": 32, **NO_BUFFER},
            "is 32, .*no_buffer .*: 16 places at most, or extra_buffer",
        ),
        (4, NO_BUFFER, "is 16, more than twice .*no_buffer reads them; allowed: extra_buffer"),
        (8, {"linear_replayssm_cache_len": 32, "enable_mixed_chunk": True}, "--enable-mixed-chunk .*: 16 places"),
        (8, {"linear_replayssm_cache_len": 32, **DECODES}, "-retraction-backup cpu_tensor .*: 16 .*, or none"),
    ],
)
def test_rings_that_are_refused(block_size: int, asked: dict[str, Any], words: str) -> None:
    """Fails where a ring is accepted that a step overflows, that no kernel takes, or past whose updates a finish, a
    mixed chunk or a backup reads; or where a sentence lacks value, flag or what is allowed."""
    with pytest.raises(ValueError, match=words):
        state_ring.check(config_of(**asked), GATED, block_size)


@pytest.mark.parametrize(
    "asked",
    [
        {"linear_replayssm_cache_len": 64},
        {"linear_replayssm_cache_len": 64, **NO_BUFFER, "disable_radix_cache": True},
        {"linear_replayssm_cache_len": 64, **NO_BUFFER, "mamba_ssm_dtype": "bfloat16"},
        {**NO_BUFFER, **DECODES, "enable_mixed_chunk": True},
        {"linear_replayssm_cache_len": 64, **DECODES, "disaggregation_decode_retraction_backup": "none"},
        {"linear_replayssm_cache_len": 24, "enable_linear_replayssm_spec": False},
    ],
)
def test_rings_that_are_allowed(asked: dict[str, Any]) -> None:
    """Fails where a ring is refused whose states nothing reads too early, or that is not asked for."""
    state_ring.check(config_of(**asked), GATED, 8)


def test_other_targets_get_no_ring() -> None:
    """Fails where the flag is ignored with a target without gated delta nets."""
    kimi = KimiLinearConfig(num_hidden_layers=1, linear_attn_config={"kda_layers": [1], "full_attn_layers": []})
    kimi.architectures = ["KimiLinearForCausalLM"]
    for config in (Qwen3Config(architectures=["Qwen3ForCausalLM"]), kimi):
        target = SimpleNamespace(hf_config=config, linear_attn_registry_result=None)
        with pytest.raises(ValueError, match=f"gated delta nets .*{config.architectures[0]}: leave it out"):
            state_ring.check(config_of(), target, 8)


@pytest.mark.parametrize("length", [16, 32])
def test_bytes_of_a_ring(length: int) -> None:
    """Fails where a ring's memory is computed from other sizes than those that SGLang allocates."""
    arm = Arm(length, cpu_rule, torch.bfloat16)
    config = SimpleNamespace(
        linear_num_key_heads=KEY_HEADS,
        linear_key_head_dim=DIM,
        linear_num_value_heads=HEADS,
        linear_value_head_dim=DIM,
        linear_conv_kernel_dim=TAPS,
        linear_layer_ids=arm.cache_params.layers,
    )
    parts = [part for name, part in vars(arm.cache).items() if name.startswith("replayssm_") and part is not None]
    parts += arm.cache.intermediate_conv_window
    taken = state_ring.scratch_bytes(config, length, BLOCK, on_cpu=True)
    assert sum(part.nbytes for part in parts) == taken * (REQUESTS + 1)
    windows = len(config.linear_layer_ids) * arm.cache_params.shape.conv_dim * (BLOCK + TAPS - 2) * 2
    ring = arm.cache_params.replayssm_ring_bytes_per_req(length)
    assert state_ring.scratch_bytes(config, length, BLOCK, on_cpu=False) == ring + windows


def test_the_memory_line_says_what_a_ring_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails where the start counts states of all rows although it keeps rings, or refuses rings that fit."""
    monkeypatch.setattr(recurrent_state, "get_device_memory_capacity", lambda device: 10 * 1000)  # MiB: 10.5 GB
    shape = {"max_running_requests": 9, "device": "cuda", "model_path": "hub/name", "tp_size": 1}
    cfg = SimpleNamespace(**shape, disaggregation_mode="null", linear_replayssm_cache_len=16)
    caplog.set_level("INFO")
    recurrent_state._check_memory(cfg, 150_000_000, 16, 40_000_000)  # 24 GB of states do not fit
    assert "150.00 MB for each request; a verification keeps a ring of updates (--enable-linear-re" in caplog.text
    assert "takes 0.40 of the 10.5 GB" in caplog.text and "9 x --linear-replayssm-cache-len 16)" in caplog.text
    cfg.max_running_requests = 300
    with pytest.raises(ValueError, match=r"12\.0 GB for rings of updates \(40\.0 MB each\).* at most 261 requests"):
        recurrent_state._check_memory(cfg, 150_000_000, 16, 40_000_000)
    with pytest.raises(ValueError, match="recurrent states of a verification"):
        recurrent_state._check_memory(cfg, 150_000_000, 16)

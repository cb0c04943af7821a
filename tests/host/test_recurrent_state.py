"""Which recurrent states the CPU has, how large one is, and what Kimi-Linear lacks in SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs import (
    BailingHybridConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    NemotronHConfig,
    Qwen3NextConfig,
)

from sglang_cpu.hooks import refusal_of_state
from sglang_cpu.loading import mend_kimi_linear
from sglang_dflash.host.patches import capture
from sglang_dflash.host.worker import recurrent_state

KIMI = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}


def model_of(config: object, architecture: str) -> SimpleNamespace:
    config.architectures = [architecture]
    return SimpleNamespace(hf_config=config, linear_attn_registry_result=None)


def kimi_linear() -> KimiLinearConfig:
    layers = {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    return KimiLinearConfig(num_hidden_layers=4, linear_attn_config={**KIMI, **layers})


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (kimi_linear(), "KimiLinearForCausalLM"),
        (Qwen3NextConfig(), "Qwen3NextForCausalLM"),
        (NemotronHConfig(), "NemotronHForCausalLM"),
    ],
    ids=["Kimi-Linear", "Qwen3-Next", "Nemotron-H"],
)
def test_states_that_have_ops_are_served(config, architecture):
    """Fails where a state that our ops compute is refused."""
    assert refusal_of_state(model_of(config, architecture)) is None


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (kimi_linear(), "KimiK3LinearForCausalLM"),
        (BailingHybridConfig(), "BailingMoeV2_5ForCausalLM"),
        (FalconH1Config(), "FalconH1ForCausalLM"),
        (
            GraniteMoeHybridConfig(num_hidden_layers=2, layer_types=["mamba", "attention"]),
            "GraniteMoeHybridForCausalLM",
        ),
        (Lfm2Config(), "Lfm2ForCausalLM"),
        (NemotronHConfig(), "NemotronHForCausalLMMTP"),
    ],
)
def test_other_states_are_refused(config, architecture):
    """Fails where bounded decays, or another state, are served as if they were Kimi-Linear's, or a model with Mamba-2
    layers that none has run as if it were Nemotron-H."""
    assert architecture in refusal_of_state(model_of(config, architecture))


def test_bytes_of_a_kimi_state():
    """Fails where the memory of a verification is computed from the wrong sizes."""
    matrix, inputs = 32 * 128 * 128 * 4, 3 * 32 * 128 * 3 * recurrent_state.INPUT_BYTES
    cfg = SimpleNamespace(mamba_ssm_dtype=None)
    assert recurrent_state._gated_delta_bytes(kimi_linear(), cfg) == 3 * (matrix + inputs)


def test_bytes_of_a_nemotron_state():
    """Fails where the memory of a verification is computed from other sizes than those of the layers with a state, in
    the dtype that the flag names."""
    config = NemotronHConfig(
        layers_block_type=["mamba", "mlp", "attention", "mamba", "mamba"],
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        mamba_d_conv=4,
    )
    inputs = (128 * 64 + 2 * 8 * 128) * 3 * recurrent_state.INPUT_BYTES
    for named, size in ((None, 4), ("bfloat16", 2)):
        cfg = SimpleNamespace(mamba_ssm_dtype=named)
        assert recurrent_state._mamba2_bytes(config, cfg) == 3 * (128 * 64 * 128 * size + inputs)


def test_states_must_fit_beside_the_weights(monkeypatch, tmp_path):
    """Fails where states that fit the empty device are not refused beside weights that fill most of it."""
    monkeypatch.setattr(recurrent_state, "get_device_memory_capacity", lambda device: 10 * 1000)  # MiB: 10.5 GB
    weights = tmp_path / "model.safetensors"
    shape = {"max_running_requests": 9, "device": "cuda", "model_path": str(tmp_path), "tp_size": 2}
    cfg = SimpleNamespace(**shape, disaggregation_mode="null", disaggregation_decode_extra_slots=18)
    recurrent_state._check_memory(cfg, 50_000_000, 16)  # 10 x 16 states take 8 GB
    with weights.open("wb") as file:
        file.truncate(8_000_000_000)  # sparse: 4 GB on each of two ranks
    with pytest.raises(ValueError, match=r"takes 8\.0 GB .* leave 6\.5 .*10\.5 GB: at most 7 requests would fit"):
        recurrent_state._check_memory(cfg, 50_000_000, 16)
    cfg.model_path = "some/hub-name"
    recurrent_state._check_memory(cfg, 50_000_000, 16)
    cfg.disaggregation_mode = "decode"  # requests that arrive have places of their own
    with pytest.raises(ValueError, match=r"takes 22\.4 GB"):
        recurrent_state._check_memory(cfg, 50_000_000, 16)


class KimiMoE(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.topk = torch.nn.Module()
        self.topk.topk_config = SimpleNamespace(apply_routed_scaling_factor_on_output=False)


class KimiDeltaAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused_fg_b_proj = torch.nn.Linear(2, 2)
        self.o_proj = torch.nn.Linear(2, 2, dtype=torch.bfloat16)


def test_kimi_linear_is_mended():
    """Fails where its routed experts count less than they were trained to, or a product has two dtypes."""
    experts, attention = KimiMoE(), KimiDeltaAttention()
    mend_kimi_linear(torch.nn.Sequential(torch.nn.Linear(2, 2), experts, attention))
    assert experts.topk.topk_config.apply_routed_scaling_factor_on_output
    assert attention.fused_fg_b_proj.weight.dtype == torch.bfloat16


class KimiLinearForCausalLM:
    model = SimpleNamespace(layers=range(4))

    def set_dspark_layers_to_capture(self, layers: list[int]) -> None:
        self.taps = layers


def test_kimi_linear_gets_a_setter_of_taps():
    """Fails where the start ends for lack of the setter, or the taps are others."""
    model = KimiLinearForCausalLM()
    capture.configure_capture(
        lambda *, model, dflash_target_layer_ids, **rest: model.set_dflash_layers_to_capture(dflash_target_layer_ids),
        model=model,
        dflash_use_aux_hidden_state=True,
        dflash_target_layer_ids=[0, 2],
        is_dspark=False,
    )
    assert model.taps == [0, 2]

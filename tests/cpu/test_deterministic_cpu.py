"""What `--enable-deterministic-inference` on a plain CPU refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.server_args import ServerArgs

from sglang_cpu import deterministic
from sglang_dflash.serving import TINY_TARGET

FINE = {"attention_backend": "dflash_cpu"}


def refusal(model: dict[str, object] | None = None, **flags: object) -> str | None:
    cfg = resolving_view(ServerArgs(model_path=str(TINY_TARGET), device="cpu", **{**FINE, **flags}))
    text = SimpleNamespace(architectures=["Some"], **(model or {}))
    described = SimpleNamespace(
        quantization=(model or {}).get("quantization"),
        dtype=(model or {}).get("dtype", torch.float32),
        attention_arch=(model or {}).get("attention_arch", AttentionArch.MHA),
        hf_text_config=text,
        hf_config=text,
    )
    return deterministic._unserved(cfg, described)


@pytest.fixture(autouse=True)
def _plain_configs(monkeypatch):
    monkeypatch.setattr(deterministic, "mambaish_config", lambda model: getattr(model.hf_text_config, "state", None))


def test_an_ordinary_server_is_served():
    """Fails where the check refuses a server that works."""
    assert refusal() is None
    assert refusal(tp_size=2) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp_size": 4}, ["--tp-size 4", "2"]),
        ({"enable_torch_compile": True}, ["--enable-torch-compile"]),
        ({"rl_on_policy_target": "fsdp"}, ["--rl-on-policy-target fsdp"]),
        ({"enable_lora": True}, ["--enable-lora"]),
        ({"attention_backend": "torch_native"}, ["torch_native", "dflash_cpu"]),
        ({"prefill_attention_backend": "triton"}, ["triton", "dflash_cpu"]),
        ({"model": {"quantization": "awq"}}, ["awq"]),
        ({"model": {"dtype": torch.float16}}, ["--dtype float16", "bfloat16"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype fp8_e5m2", "auto"]),
        ({"model": {"attention_arch": AttentionArch.MLA}}, ["latent attention", "Some"]),
        ({"model": {"num_experts": 8}}, ["num_experts 8"]),
        ({"model": {"state": object()}}, ["recurrent", "Some"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_could_mix_rows_is_refused(flags, words):
    """Fails where a kernel that is not shown to be batch-invariant serves silently."""
    sentence = refusal(**flags)
    assert sentence is not None and all(word in sentence for word in words), sentence


def test_torch_bodies_are_refused(monkeypatch):
    """Fails where a server without native ops starts: a row's bits would depend on its batch."""
    monkeypatch.setattr(deterministic.ops.native, "isa", lambda: None)
    assert (
        refusal()
        == "without the native ops, whose rows do not depend on each other (not built, the specification instead)"
    )

"""Which forwards are compiled on a CPU, and what is said about it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_cpu import compiled
from sglang_cpu.attention import CpuAttentionBackend


class Model(torch.nn.Module):
    """A target of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(2, 2)


class Attention(CpuAttentionBackend):
    """Stands for our backend."""

    def __init__(self) -> None:
        pass


def runner(architecture="Qwen3ForCausalLM", draft=False, quantization=None, attention=None):
    attention = Attention() if attention is None else attention
    hf_config = SimpleNamespace(architectures=[architecture])
    config = SimpleNamespace(hf_config=hf_config, quantization=quantization)
    return SimpleNamespace(is_draft_worker=draft, model_config=config, model=Model(), attn_backend=attention)


@pytest.fixture(autouse=True)
def _plain_server(monkeypatch):
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    monkeypatch.setattr(compiled, "get_exec", lambda: SimpleNamespace(deterministic=deterministic))
    monkeypatch.setattr(compiled, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    monkeypatch.setattr(compiled, "get_lora", lambda: SimpleNamespace(enable_lora=False))
    monkeypatch.setattr(compiled, "is_latent", lambda config: False)
    monkeypatch.setattr(compiled, "mamba2_config", lambda config: None)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.parametrize(
    ("asked", "target", "words"),
    [
        ("", runner(), None),
        ("1", runner(), None),
        ("0", runner(), "SGLANG_DFLASH_COMPILE=0"),
        ("", runner("NewForCausalLM"), "have not compared NewForCausalLM with and without; SGLANG_DFLASH_COMPILE=1"),
        ("1", runner("NewForCausalLM"), None),
        ("", runner("DFlashDraftModel", draft=True), None),
        ("", runner(quantization="fp8"), "have not compared fp8 weights"),
        ("1", runner(quantization="fp8"), None),
        ("", runner(attention=SimpleNamespace(full_attn_backend=Attention())), None),
        ("1", runner(attention=SimpleNamespace()), "its attention is not dflash_cpu"),
        ("", runner("DFlashDraftModel", draft=True, attention=object()), "its attention is not dflash_cpu"),
    ],
)
def test_who_is_compiled(monkeypatch, asked, target, words):
    """Fails where a target whose trace nobody has compared is compiled unasked, or where a tested one is not."""
    monkeypatch.setenv(compiled.VARIABLE, asked)
    reason = compiled.why_not(target)
    assert reason is None if words is None else words in reason


def test_no_compiler(monkeypatch):
    """Fails where a server without a C++ compiler tries all the same, or does not look for the one of CXX."""
    monkeypatch.setenv("CXX", "clang++")
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None if name == "clang++" else name)
    assert "no C++ compiler" in compiled.why_not(runner())


@pytest.mark.parametrize("asked", ["yes", "2", " "])
def test_unknown_values_are_refused(monkeypatch, asked):
    """Fails where a typing error silently means off."""
    monkeypatch.setenv(compiled.VARIABLE, asked)
    with pytest.raises(SystemExit, match=f"SGLANG_DFLASH_COMPILE is '{asked}'; allowed: 0 .never., 1 .wherever"):
        compiled.check()


def test_a_compiler_that_fails_leaves_the_forward_alone(monkeypatch, caplog):
    """Fails where a server ends because its compiler lacks a header, or where nobody is told."""
    caplog.set_level(logging.INFO, logger=compiled.__name__)

    def fail(target):
        raise RuntimeError("fatal error: Python.h: No such file or directory")

    monkeypatch.setattr(compiled, "_install_target", fail)
    target = runner()
    forward = target.model.model.forward
    compiled.capture_forward(lambda runner: None, target)
    assert target.model.model.forward == forward
    begun, failed = (record for record in caplog.records if record.name == compiled.__name__)
    assert "SGLANG_DFLASH_COMPILE=0 skips it" in begun.getMessage() and "runs uncompiled" in failed.getMessage()
    assert "Python.h" in str(failed.exc_info[1])

"""What the CPU platform refuses of targets with latent attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_cpu import mla


def check(monkeypatch: pytest.MonkeyPatch, **config: object) -> list[str]:
    """Runs the check; returns what it passed on to."""
    text = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], **config)
    monkeypatch.setattr(mla, "model_config_of", lambda arguments: SimpleNamespace(hf_text_config=text, hf_config=text))
    passed: list[str] = []
    mla._check_target("arguments", passed.append)
    return passed


def test_a_target_without_an_indexer_is_served(monkeypatch):
    """Fails where the check refuses a server that works, or keeps the host's own adjustments from running."""
    assert check(monkeypatch) == ["arguments"]


def test_an_indexer_is_refused(monkeypatch):
    """Fails where a target whose rows see selected keys is served as if they saw all."""
    with pytest.raises(SystemExit, match=r"DeepseekV3ForCausalLM.*index_topk is 2048"):
        check(monkeypatch, index_topk=2048)

"""When a captured model is called without SGLang's runners, and in what context."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_context import get_attn_backend, has_forward_context

from sglang_dflash.host.cpu import direct
from sglang_dflash.host.cpu.direct import DirectForward


class Model:
    """Says with which attention backend it runs."""

    def forward(self, ids, positions, batch, **kwargs):
        assert get_attn_backend().prepared is batch, "the attention backend has not seen the batch"
        return ids, positions, kwargs


class Backend:
    def init_forward_metadata(self, batch):
        self.prepared = batch


def runner(**parts):
    idle = {"dflash_captured": object(), "enable_elastic_ep": False, "forward_pass_id": 3}
    return SimpleNamespace(**{**idle, "model": Model(), "attn_backend": Backend(), **parts})


def batch(**fields):
    return SimpleNamespace(**{"input_ids": "ids", "positions": "positions", "input_embeds": None, **fields})


def test_the_model_runs_in_its_context():
    """Fails where attention has no metadata or no backend, embeddings are lost, or a context stays behind."""
    target = runner()
    forward = DirectForward.of(target)
    assert forward(batch()) == ("ids", "positions", {})
    assert forward(batch(input_embeds="embeds")) == ("ids", "positions", {"input_embeds": "embeds"})
    assert not has_forward_context()
    assert target.forward_pass_id == 5


def test_an_error_leaves_no_context():
    """Fails where an error in the model leaves its attention backend to the next forward."""
    target = runner(model=SimpleNamespace(forward=lambda *args: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        DirectForward.of(target)(batch())
    assert not has_forward_context()


@pytest.mark.parametrize("part", direct.NEEDS)
def test_parts_that_act_around_a_forward(part):
    """Fails where a part of the server that acts before or after each forward is passed by."""
    assert DirectForward.of(runner(**{part: object()})) is None
    assert DirectForward.of(runner(**{part: None})) is not None


def test_other_reasons(monkeypatch):
    """Fails where an uncaptured model, one that prepares its batches, or one whose experts are watched is called."""
    uncaptured = runner()
    del uncaptured.dflash_captured
    assert DirectForward.of(uncaptured) is None
    for name in direct.PREPARES:
        assert DirectForward.of(runner(model=SimpleNamespace(**{name: lambda batch: None}))) is None
    assert DirectForward.of(runner(enable_elastic_ep=True)) is None
    for name in ("get_global_expert_distribution_recorder", "get_global_experts_capturer"):
        with monkeypatch.context() as patch:
            patch.setattr(direct, name, object)
            assert DirectForward.of(runner()) is None
    monkeypatch.setenv("SGLANG_ENABLE_METRICS_DEVICE_TIMER", "1")
    assert DirectForward.of(runner()) is None
    monkeypatch.delenv("SGLANG_ENABLE_METRICS_DEVICE_TIMER")
    monkeypatch.setattr(direct, "dumper", SimpleNamespace(may_enable=True))
    assert DirectForward.of(runner()) is None

"""Weights move to huge pages after a load; a server without huge pages still serves, and says so."""

from __future__ import annotations

import logging

import pytest
import torch
from sglang.srt.platforms import current_platform

from sglang_cpu import loading
from sglang_cpu.ops import huge_pages


def test_without_memory_weights_stay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails where missing huge pages end the server, or the log does not mention them."""

    def fail(size: int, page: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages, "page_bytes", lambda: 2 << 20)
    monkeypatch.setattr(huge_pages, "_region", fail)
    model = torch.nn.Linear(4, 3)
    before = [weight.data_ptr() for weight in model.parameters()]
    with caplog.at_level(logging.WARNING):
        loading.move_weights(model)
    assert [weight.data_ptr() for weight in model.parameters()] == before
    assert "stay on small pages" in caplog.text


def test_weights_move(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fails where the host's call after a load does not move the weights, or the log does not mention them."""
    monkeypatch.setattr(huge_pages, "page_bytes", lambda: 2 << 20)
    model = torch.nn.Linear(4, 3)
    with caplog.at_level(logging.INFO):
        current_platform.post_load_model(model)
    assert min(weight.data_ptr() for weight in model.parameters()) % (2 << 20) == 0
    assert "Linear's weights are on huge pages" in caplog.text

"""The measurement of sampling before the server is up: what is sampled, and what happens where memory is short."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.host.worker import sampling_memory
from sglang_dflash.host.worker.sampling_memory import measure_sampling

WIDTH, VOCAB = 16, 100


@pytest.mark.parametrize(
    ("fits", "max_batch", "rows"),
    [(10_000, 256, 512), (10_000, 3, 48), (511, 256, 256), (100, 256, 64), (20, 256, 16)],
)
def test_as_many_rows_as_fit(fits, max_batch, rows, monkeypatch, caplog):
    """Fails where a device with too little memory ends the start, or rows are sampled that did not fit; or where more
    rows are rehearsed than a batch can have."""
    tried = []

    def rehearse(sampler, batch, width, vocab_size, seeded, device) -> None:
        tried.append(batch * width)
        if batch * width > fits:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(sampling_memory, "rehearse", rehearse)
    monkeypatch.setattr(sampling_memory, "_peak_bytes", lambda call: call() or 7)
    sampler = SimpleNamespace(sampled_rows=512)
    with caplog.at_level(logging.WARNING):
        result = measure_sampling(sampler, WIDTH, max_batch, VOCAB, False, "cuda", lambda fits: fits)
    assert tried[-1] == rows <= sampler.sampled_rows and sampler.sampled_rows <= 512
    assert (result.sampling_input_bytes, result.sampling_headroom_bytes) == (rows * VOCAB * 4, 7)
    assert ("--mem-fraction-static" in caplog.text) == (len(tried) > 1)


def test_one_request_must_fit(monkeypatch):
    """Fails where a device that cannot sample one request's block starts all the same, or tries for ever."""

    def short(call) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(sampling_memory, "_peak_bytes", short)
    with pytest.raises(torch.OutOfMemoryError):
        measure_sampling(SimpleNamespace(sampled_rows=512), WIDTH, 256, VOCAB, False, "cuda", lambda fits: fits)


def test_all_ranks_take_as_many_rows_as_the_poorest(monkeypatch):
    """Fails where a rank with more memory keeps more rows: ranks would then call their samplers unequally often."""
    answers = iter([False, False, True])
    monkeypatch.setattr(sampling_memory, "_peak_bytes", lambda call: 7)
    sampler = SimpleNamespace(sampled_rows=512)
    measure_sampling(sampler, WIDTH, 256, VOCAB, False, "cuda", lambda fits: fits and next(answers))
    assert sampler.sampled_rows == 128

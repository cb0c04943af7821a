"""What our CPU platform spares the scheduler does the same as the scheduler's own code."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from stand_ins import Batch, configured, make_req

from sglang_dflash.host.cpu import scheduling


def batch_of_the_host() -> ScheduleBatch:
    """Every field holds an object of its own; the sampling info is the host's."""
    reqs = [make_req(str(row), row, 64, temperature=0.0) for row in range(2)]
    batch = ScheduleBatch(reqs=reqs)
    for name in scheduling.FIELDS:
        setattr(batch, name, object())
    batch.sampling_info = Batch(reqs, 64).sampling_info
    batch.sampling_info.penalizer_orchestrator = SimpleNamespace(is_required=False)
    batch.spec_algorithm = SpeculativeAlgorithm.from_string("DFLASH")
    return batch


def _theirs(scheduler: Any, batch: Any, *, overlap: bool) -> Any:
    original = Scheduler._forward_isolation
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    return contextmanager(original)(scheduler, batch, overlap=overlap)


@pytest.mark.parametrize("isolate", [_theirs, lambda *args, **kwargs: scheduling.isolate(_theirs, *args, **kwargs)])
def test_a_forward_leaves_no_trace_in_its_batch(isolate):
    """Fails where a field that a forward changes is not given back, even after an error, or where the forward's
    sampling info is not the copy without penalizers that the host hands out."""
    with configured():
        batch = batch_of_the_host()
        before = {name: getattr(batch, name) for name in scheduling.FIELDS}
        info = before["sampling_info"]
        with pytest.raises(ZeroDivisionError), isolate(None, batch, overlap=False):
            shown = batch.sampling_info
            assert shown is not info and shown.penalizer_orchestrator is None
            for field in dataclasses.fields(info):
                if field.name != "penalizer_orchestrator":
                    assert getattr(shown, field.name) is getattr(info, field.name), field.name
            for name in scheduling.FIELDS:
                setattr(batch, name, None)
            raise ZeroDivisionError
    assert all(getattr(batch, name) is value for name, value in before.items())
    assert info.penalizer_orchestrator is not None


def test_overlap_and_plain_decoding_keep_the_hosts_way():
    """Fails where our isolation takes the place of the host's under overlap, which keeps tensors alive for two steps,
    or without speculation, whose forwards may change the batch."""
    with configured():
        batch = batch_of_the_host()
    asked = []
    scheduling.isolate(lambda *args, **kwargs: asked.append(kwargs), None, batch, overlap=True)
    batch.spec_algorithm = SpeculativeAlgorithm.NONE
    scheduling.isolate(lambda *args, **kwargs: asked.append(kwargs), None, batch, overlap=False)
    assert asked == [{"overlap": True}, {"overlap": False}]


def test_the_profilers_span_of_a_copy(monkeypatch):
    """Fails where a result is not copied, where the span of a running profiler is lost, or where another plugin's hook
    around the copy is left out."""
    assert scheduling.UNRECORDED is not None, "the host opens no span any more"
    calls = []
    monkeypatch.setattr(scheduling, "UNRECORDED", lambda *args: calls.append("plain"))

    def original(*args):
        calls.append("original")

    result = GenerationBatchResult(logits_output=None, can_run_cuda_graph=False)
    scheduling.copy_unrecorded(original, result, False)  # another hook, or a copy without a span
    original.__wrapped__ = scheduling.UNRECORDED
    scheduling.copy_unrecorded(original, result, False)
    with torch.autograd.profiler.profile():
        scheduling.copy_unrecorded(original, result, False)
    assert calls == ["original", "plain", "original"]

"""Packed steps on the made-up CUDA device of `test_fake_cuda.py`: nothing waits, devices do not mix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.speculative.ragged_verify_kernels import BuildQoIndptr
from stand_in_worker import BATCH, BLOCK, decode_batch, worker_of
from stand_ins import make_sampler
from test_fake_cuda import ASKED, Watch, run, table_of, watch
from torch._subclasses.fake_tensor import DataDependentOutputException

from sglang_dflash import ops
from sglang_dflash.core.row_budget import Budget
from sglang_dflash.host import packed_step
from sglang_dflash.host.packed_step import PackedStep
from sglang_dflash.host.worker import DFlashWorker

__all__ = ["watch"]  # a fixture
SIZE = BATCH * BLOCK  # as many rows as the stand-in's forwards return


class Silent:
    """In the place of a clock and of a readback: a made-up device has no events."""

    def __init__(self, device: Any) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, label: Any, values: torch.Tensor) -> None:
        self.sent.append(values)

    def arrived(self) -> list[Any]:
        return []

    readings = arrived

    def mark(self, label: Any) -> None:
        pass


def packed_worker(monkeypatch: pytest.MonkeyPatch, budget: Budget, sampler: Any = None) -> DFlashWorker:
    monkeypatch.setattr(BuildQoIndptr, "triton", BuildQoIndptr.torch)
    monkeypatch.setattr(packed_step, "Readback", Silent)
    monkeypatch.setattr(packed_step, "StepClock", Silent)
    one = worker_of(table_of(), ops.choose_kernels("cuda", torch.float32), sampler)
    one._target.sliding_window_size = None
    one.planned = PackedStep(BLOCK, one._target, one._draft, one.lay_out, one.plan_kv)
    one.planned._budget = SimpleNamespace(choose=lambda batch: budget)
    return one


@pytest.mark.parametrize("budget", [Budget(10, SIZE, True), Budget(SIZE, SIZE, True), Budget(BATCH, SIZE, False)])
def test_a_greedy_step(monkeypatch: pytest.MonkeyPatch, watch: Watch, budget: Budget) -> None:
    """Fails where choosing, packing, spreading or learning rows waits for the device or mixes devices."""
    one = packed_worker(monkeypatch, budget)
    result = run(watch, one, decode_batch("cuda"))
    assert not watch.waits
    assert result.next_token_ids.shape == (BATCH * BLOCK,) and result.cap_lens.shape == (BATCH,)
    sent = one.planned._readback.sent
    assert [len(values) for values in sent] == [2 + BATCH * (BLOCK - 1)] * budget.drafts  # the first is looked at
    run(watch, one, decode_batch("cuda"))
    assert not watch.waits
    assert len(sent) == budget.drafts * (1 if budget.rows == SIZE else 2)


@pytest.mark.parametrize("asked", ["filters", "a bias"])
def test_a_sampled_step(monkeypatch: pytest.MonkeyPatch, watch: Watch, asked: str) -> None:
    """Fails where sampling the rows of packed blocks waits for the device."""
    run(watch, packed_worker(monkeypatch, Budget(10, SIZE, True), make_sampler()), decode_batch("cuda", **ASKED[asked]))
    assert not watch.waits


def test_the_drafts_chances_can_be_captured(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Fails where the draft's graph would hold a wait, or the step's buffers are not those that it fills."""
    head = packed_worker(monkeypatch, Budget(10, SIZE, True))._draft._head
    head.reserve(4)
    hidden = torch.zeros(BATCH * BLOCK, head._lm_head.weight.shape[1], device="cuda")
    with watch:
        head(hidden, torch.zeros(BATCH * BLOCK, dtype=torch.int64, device="cuda"))
    assert not watch.waits
    assert head.captured_log_probs.shape == (4, BLOCK - 1)


def test_the_watch_sees_a_read(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Fails where this file could not fail: a layout that reads the lengths from the device."""
    one = packed_worker(monkeypatch, Budget(10, SIZE, True))
    original = ops.likeliest_rows

    def reading(reach: torch.Tensor, *rest: Any) -> ops.PackedRows:
        packed = original(reach, *rest)
        return packed._replace(lens=packed.lens.clamp(max=int(packed.lens.sum())))

    monkeypatch.setattr(ops, "likeliest_rows", reading)
    with pytest.raises(DataDependentOutputException):
        run(watch, one, decode_batch("cuda"))

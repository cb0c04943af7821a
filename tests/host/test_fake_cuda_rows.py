"""Rows chosen on the made-up CUDA device of `test_fake_cuda.py`: nothing waits, devices do not mix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.kernels.ops.speculative.ragged_verify_kernels import BuildQoIndptr
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from stand_in_worker import BATCH, BLOCK, VOCAB, decode_batch, worker_of
from stand_ins import configured, make_sampler
from test_fake_cuda import ASKED, Watch, run, table_of, watch
from torch._subclasses.fake_tensor import DataDependentOutputException

from sglang_dflash import ops
from sglang_dflash.core.policy import Drafting
from sglang_dflash.host.patches.ragged import positions_of_sections
from sglang_dflash.host.worker import device_rows, rows
from sglang_dflash.host.worker.trimmed_rows import TrimmedRows
from sglang_dflash.host.worker.worker import DFlashWorker

__all__ = ["watch"]  # a fixture
SIZE = BATCH * BLOCK  # as many rows as the stand-in's forwards return
SOME, WHOLE, NONE = Drafting(BLOCK, [0, 1, 2], 10), Drafting(BLOCK, [0, 1, 2], SIZE), Drafting(1, [], BATCH)


class Silent:
    """In the place of a clock and of a readback: a made-up device has no events."""

    def __init__(self, device: Any) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, label: Any, values: torch.Tensor) -> None:
        self.sent.append(values)

    def arrived(self) -> list[Any]:
        return []

    readings = arrived

    def begin(self) -> None:
        pass

    def drafted(self, label: Any) -> None:
        pass


def worker_with(monkeypatch: pytest.MonkeyPatch, drafting: Drafting, sampler: Any = None) -> DFlashWorker:
    monkeypatch.setattr(BuildQoIndptr, "triton", BuildQoIndptr.torch)
    monkeypatch.setattr(device_rows, "Readback", Silent)
    monkeypatch.setattr(rows, "StepClock", Silent)
    kernels = ops.choose_kernels("cuda", torch.float32)
    one = worker_of(table_of(), kernels, sampler)
    monkeypatch.setattr(TrimmedRows, "made", False)
    policy = SimpleNamespace(
        weighs=True,
        draft=lambda names: drafting,
        offsets=lambda names, depths: np.zeros((len(names), depths), np.float32),
    )
    one.step_rows = TrimmedRows(BLOCK, policy, one._target, one._draft, VOCAB - 1, kernels)
    one.step_rows._sizes, one.step_rows._slots = [10, SIZE], BATCH
    return one


@pytest.mark.parametrize("drafting", [SOME, WHOLE, NONE])
def test_a_greedy_step(monkeypatch: pytest.MonkeyPatch, watch: Watch, drafting: Drafting) -> None:
    """Fails where choosing, packing or spreading rows waits for the device or mixes devices."""
    one = worker_with(monkeypatch, drafting)
    result = run(watch, one, decode_batch("cuda"))
    assert not watch.waits
    assert result.next_token_ids.shape == (BATCH * BLOCK,)
    sent = one.step_rows._readback.sent
    assert [values.shape for values in sent] == [(BATCH, BLOCK - 1 + 2)] * (drafting.width > 1)


@pytest.mark.parametrize("drafting", [SOME, WHOLE, NONE])
@pytest.mark.parametrize("delta", [None, 0, -5])
def test_a_step_of_a_wrapper(
    monkeypatch: pytest.MonkeyPatch, watch: Watch, drafting: Drafting, delta: int | None
) -> None:
    """Fails where the positions of a request with an image wait for the device, or where text uploads any."""
    name = "compute_spec_mrope_positions"  # hooked, as on a server
    original = getattr(ForwardBatch, name)
    monkeypatch.setattr(ForwardBatch, name, lambda *given: positions_of_sections(original, *given))
    uploads = []
    for of_sections in (False, True):
        one, batch = worker_with(monkeypatch, drafting), decode_batch("cuda")
        one._target.model_config.model_is_mrope = of_sections
        image = None if delta is None else SimpleNamespace(mrope_position_delta=delta)
        batch.multimodal_inputs = [None, image, None]
        verified = watched_forwards(monkeypatch, one)
        watch.launches.clear()
        run(watch, one, batch)
        uploads.append(watch.launches["upload"])
    assert not watch.waits and uploads[1] == uploads[0] + bool(delta)
    (forward_batch,) = verified
    assert forward_batch.mrope_positions.shape == (3, one.step_rows.size_for(drafting.rows))


def watched_forwards(monkeypatch: pytest.MonkeyPatch, one: DFlashWorker) -> list[Any]:
    """The batches that the target verifies from now on."""
    seen: list[Any] = []
    forward = one._target_worker.forward_batch_generation

    def keep(batch: Any = None, forward_batch: Any = None, **rest: Any) -> Any:
        seen.append(forward_batch)
        return forward(batch, **rest)

    monkeypatch.setattr(one._target_worker, "forward_batch_generation", keep)
    return seen


@pytest.mark.parametrize("asked", ["filters", "a bias"])
def test_a_sampled_step(monkeypatch: pytest.MonkeyPatch, watch: Watch, asked: str) -> None:
    """Fails where sampling the rows waits for the device."""
    run(watch, worker_with(monkeypatch, SOME, make_sampler()), decode_batch("cuda", **ASKED[asked]))
    assert not watch.waits


def test_a_step_that_the_op_samples(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Fails where the op's draw of chosen rows waits for the device, or is not used."""
    one = worker_with(monkeypatch, SOME, make_sampler())
    with configured(sampling_backend="flashinfer"):
        result = run(watch, one, decode_batch("cuda", **ASKED["filters"]))
    assert result.next_token_ids.shape == (BATCH * BLOCK,)
    assert not watch.waits and watch.launches["triton.sample_rows"] == 1


def test_the_drafts_chances_can_be_captured(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Fails where the draft's graph would hold a wait, or the step's buffers are not those that it fills."""
    head = worker_with(monkeypatch, SOME)._draft._head
    head.reserve(4)
    hidden = torch.zeros(BATCH * BLOCK, head._lm_head.weight.shape[1], device="cuda")
    with watch:
        head(hidden, torch.zeros(BATCH, BLOCK, dtype=torch.int64, device="cuda"))
    assert not watch.waits
    assert head.captured_log_probs.shape == (4, BLOCK - 1)


def test_the_watch_sees_a_read(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Fails where this file could not fail: a layout that reads the lengths from the device."""
    one = worker_with(monkeypatch, SOME)
    original = ops.likeliest_rows

    def reading(survival: torch.Tensor, *rest: Any) -> ops.Rows:
        chosen = original(survival, *rest)
        return chosen._replace(lens=chosen.lens.clamp(max=int(chosen.lens.sum())))

    monkeypatch.setattr(ops, "likeliest_rows", reading)
    with pytest.raises(DataDependentOutputException):
        run(watch, one, decode_batch("cuda"))

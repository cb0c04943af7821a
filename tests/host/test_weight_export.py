"""What the host exports of a target and its draft (`Engine.save_remote_model`)."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from stand_in_worker import BATCH, COLUMNS, worker_of
from stand_ins import configured, one_rank

from sglang_dflash import ops


def test_both_models_are_saved():
    """Fails where the host does not find the draft's runner in our worker, or saves the target in its place."""
    saved = []

    def runner(name: str) -> SimpleNamespace:
        return SimpleNamespace(weight_exporter=SimpleNamespace(save_remote_model=lambda url: saved.append((name, url))))

    with configured(), one_rank():
        worker = worker_of(torch.zeros(BATCH, COLUMNS, dtype=torch.int32), ops.TORCH_KERNELS)
    worker.model_runner.weight_exporter = runner("draft").weight_exporter
    manager = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner("target")), draft_worker=worker)
    SchedulerWeightUpdaterManager.save_remote_model(manager, {"url": "a", "draft_url": "b"})
    assert saved == [("target", "a"), ("draft", "b")]

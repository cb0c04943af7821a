"""What the host exports of a target and its draft (`Engine.save_remote_model`)."""

from __future__ import annotations

from types import SimpleNamespace

from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_dflash.host.worker import DFlashWorker


def test_both_models_are_saved():
    """Fails where the host does not find the draft's runner in our worker, or saves the target in its place."""
    saved = []

    def runner(name: str) -> SimpleNamespace:
        return SimpleNamespace(weight_exporter=SimpleNamespace(save_remote_model=lambda url: saved.append((name, url))))

    worker = DFlashWorker.__new__(DFlashWorker)
    worker._draft = SimpleNamespace(runner=runner("draft"))
    manager = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner("target")), draft_worker=worker)
    SchedulerWeightUpdaterManager.save_remote_model(manager, {"url": "a", "draft_url": "b"})
    assert saved == [("target", "a"), ("draft", "b")]

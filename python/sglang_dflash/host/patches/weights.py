"""Weight updates while the server runs: target and draft are two checkpoints whose tensors have the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput
from transformers import PretrainedConfig

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.core.draft_config import ARCHITECTURES
from sglang_dflash.core.draft_formats import DEEPSPEC_ARCHITECTURE, NEMO_ARCHITECTURES
from sglang_dflash.host.start.version import serves_dflash
from sglang_dflash.host.start.widths import WIDTH


class WatchedRunner:
    """A model runner for SGLang's weight updates, the draft's or the target's; calls `taken_up` after each."""

    def __init__(self, runner: Any, taken_up: Callable[[], None]) -> None:
        self._runner = runner
        self.weight_updater = _Notifying(runner.weight_updater, taken_up)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class _Notifying:
    """A weight updater that calls `changed` after each of its methods, because any of them may change weights."""

    def __init__(self, updater: Any, changed: Callable[[], None]) -> None:
        self._updater = updater
        self._changed = changed

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._updater, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            finally:
                self._changed()

        return call


class _Bystander:
    """Stands for the draft in an update of the target: it can be checked, and keeps its weights."""

    def __init__(self, runner: Any) -> None:
        self.check_weights = runner.check_weights
        self.weight_updater = self

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: (True, "The target's weights are updated; the draft keeps its own.")


@hook(
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._select_runners",
    AROUND,
    why='the default "all" would load the target\'s tensors into the draft too, under the same names; the '
    "draft's short head copies rows of the target's",
    until="updates name their model",
)
def _select_runners(original: Any, manager: Any, selector: str = "all") -> list[tuple[str, Any]]:
    """Selects the models that an update changes.

    SGLang's default, "all", loads the same tensors into both models, and a target's `layers.0` fits into a draft's.
    Here, "all" means what the open update session selected, else the target. The worker's copies of the target's
    weights follow each update.
    """
    if selector == "all" and manager._session is not None:
        selector = manager._session.selector
    runners = original(manager, selector)
    if not serves_dflash():
        return runners
    follow = getattr(manager.draft_worker, "follow_target", None)  # SGLang's own worker copies nothing
    if follow is not None:
        runners = [(role, WatchedRunner(runner, follow) if role == "target" else runner) for role, runner in runners]
    if selector != "all":
        return runners
    return [(role, runner if role == "target" else _Bystander(runner)) for role, runner in runners]


@hook(
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
    AROUND,
    why="a draft's folder would fill the target's first layers; an unknown `load_format` would end the scheduler",
    until="updates name their model",
)
def _update_from_disk(original: Any, manager: Any, request: Any) -> Any:
    """Refuses a draft's folder: updates from disk are for the target, and a draft would fill its first layers.

    Refuses an unknown format, too, which would end the scheduler.
    """
    if not serves_dflash():
        return original(manager, request)
    message = ""
    formats = [one.value for one in LoadFormat]
    if request.load_format is not None and str(request.load_format).lower() not in formats:
        message = f"load_format is {request.load_format!r}; allowed: {', '.join(formats)}."
    elif _holds_draft(request.model_path):
        message = (
            f"{request.model_path} holds a DFlash draft, and updates from disk are for the target: begin a weight "
            "update with selector 'draft' and send the draft's tensors."
        )
    elif request.recapture_cuda_graph and _has_widths(manager.draft_worker):
        message = f"recapture_cuda_graph is true; {WIDTH}=auto or a number needs false, because each width has graphs."
    return UpdateWeightFromDiskReqOutput(success=False, message=message) if message else original(manager, request)


def _has_widths(worker: Any) -> bool:
    rows = getattr(worker, "rows", None)  # SGLang's own worker has none
    return rows is not None and rows.graphs is not None


def _holds_draft(path: str) -> bool:
    try:
        config, _ = PretrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return False  # SGLang reports what is wrong with it
    names = {*ARCHITECTURES, *NEMO_ARCHITECTURES, DEEPSPEC_ARCHITECTURE}
    return config.get("architectures") in [[architecture] for architecture in names]

"""Spares a speculating step on a CPU what SGLang 0.5.23's scheduler does around it for accelerators.

All of it can go when the host does the same in less time.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractContextManager
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from torch._C._autograd import _profiler_enabled

from sglang_dflash.host.hooking import AROUND, hook

FIELDS = tuple(field.name for field in dataclasses.fields(ScheduleBatch))
UNRECORDED = getattr(GenerationBatchResult.copy_to_cpu, "__wrapped__", None)
"""The host's copy without its span; this file is imported before any hook is applied."""


class Isolation(AbstractContextManager[None]):
    """Gives a batch back its fields after a forward, which may change them."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._fields: dict[str, Any] = {}

    def __enter__(self) -> None:
        state = vars(self._batch)
        self._fields = {name: state[name] for name in FIELDS}
        if self._batch.sampling_info is not None:
            self._batch.sampling_info = _for_one_forward(self._batch.sampling_info)

    def __exit__(self, *error: object) -> None:
        vars(self._batch).update(self._fields)


def _for_one_forward(info: Any) -> Any:
    """`SamplingBatchInfo.copy_for_forward` without passing its thirty fields through the constructor."""
    info.update_penalties()
    copied = copy.copy(info)
    copied.penalizer_orchestrator = None
    return copied


@hook(
    "sglang.srt.managers.scheduler.Scheduler._forward_isolation",
    AROUND,
    why="copies and restores the batch's hundred fields by name in every speculating step",
    until="SGLang does it in less time",
)
def isolate(original: Any, scheduler: Any, batch: Any, *, overlap: bool) -> AbstractContextManager[None]:
    """The host reads and writes the batch's hundred fields by name, one by one, in every step."""
    if overlap or batch.spec_algorithm.is_none():
        return original(scheduler, batch, overlap=overlap)
    return Isolation(batch)


@hook(
    "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
    AROUND,
    why="opens a profiler's span where no profiler runs",
    until="SGLang asks for a profiler first",
)
def copy_unrecorded(original: Any, result: Any, *args: Any, **kwargs: Any) -> None:
    """The host opens a profiler's span around this copy even where no profiler runs."""
    spanned = getattr(original, "__wrapped__", None) is UNRECORDED  # no other plugin's hook
    copy_to_cpu = UNRECORDED if UNRECORDED is not None and spanned and not _profiler_enabled() else original
    copy_to_cpu(result, *args, **kwargs)

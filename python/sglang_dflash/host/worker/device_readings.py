"""Numbers and times of steps, read from a device in a later step, once they are there: nothing waits."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Generic, TypeVar

import torch
from sglang.srt.utils.common import is_pin_memory_available

Label = TypeVar("Label")


class Readback(Generic[Label]):
    """Copies small tensors to the CPU behind the work that fills them."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._sent: deque[tuple[Label, torch.Tensor, Any]] = deque()

    def send(self, label: Label, values: torch.Tensor) -> None:
        """values: read when the device gets here; a later step may overwrite them."""
        if self._device.type == "cpu":
            self._sent.append((label, values.clone(), None))
            return
        copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=is_pin_memory_available(self._device))
        copied.copy_(values, non_blocking=True)
        event = torch.get_device_module(self._device).Event()
        event.record()
        self._sent.append((label, copied, event))

    def arrived(self) -> list[tuple[Label, torch.Tensor]]:
        """All that has come since the last call, in order."""
        came = []
        while self._sent and (self._sent[0][2] is None or self._sent[0][2].query()):
            label, values, _ = self._sent.popleft()
            came.append((label, values))
        return came


class StepClock(Generic[Label]):
    """Seconds of a step's draft, and of all else up to the beginning of the next step, on the device's own clock."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._begun: Any = None  # marks of the step that runs
        self._drafted: tuple[Label, Any] | None = None
        self._steps: deque[tuple[Label, Any, Any, Any]] = deque()

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        now = torch.get_device_module(self._device).Event(enable_timing=True)
        now.record()
        return now

    def begin(self) -> None:
        """A step begins."""
        now = self._now()
        if self._drafted is not None:
            label, drafted = self._drafted
            self._steps.append((label, self._begun, drafted, now))
        self._begun, self._drafted = now, None

    def drafted(self, label: Label) -> None:
        """The step's draft is over. label: comes back with the readings."""
        self._drafted = label, self._now()

    def interrupt(self) -> None:
        """Something else comes before the next step."""
        self._drafted = None

    def readings(self) -> list[tuple[Label, float, float]]:
        """Labels and seconds, of the draft and of the rest, of all steps that have ended since the last call."""
        read = []
        while self._steps:
            label, begun, drafted, ended = self._steps[0]
            if self._device.type == "cpu":
                seconds = drafted - begun, ended - drafted
            elif ended.query():
                seconds = begun.elapsed_time(drafted) / 1000, drafted.elapsed_time(ended) / 1000
            else:
                break
            self._steps.popleft()
            read.append((label, *seconds))
        return read

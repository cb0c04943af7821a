"""Numbers and times of steps, read from a device in a later step, once they are there: nothing waits."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Generic, TypeVar

import torch
from sglang.srt.utils.common import is_pin_memory_available

Label = TypeVar("Label")


class Readback(Generic[Label]):
    """Copies small tensors to the host behind the work that fills them."""

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
    """Seconds from the beginning of a step to that of the next one, on the device's own clock."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._last: tuple[Label, Any] | None = None
        self._begun: deque[tuple[Label, Any, Any]] = deque()

    def interrupt(self) -> None:
        """Something else comes before the next step."""
        self._last = None

    def mark(self, label: Label) -> None:
        """A step begins."""
        now: Any = time.perf_counter()
        if self._device.type != "cpu":
            now = torch.get_device_module(self._device).Event(enable_timing=True)
            now.record()
        if self._last is not None:
            self._begun.append((*self._last, now))
        self._last = label, now

    def readings(self) -> list[tuple[Label, float]]:
        """The seconds of all steps that have ended since the last call."""
        read = []
        while self._begun:
            label, begin, end = self._begun[0]
            if self._device.type == "cpu":
                seconds = end - begin
            elif end.query():
                seconds = begin.elapsed_time(end) / 1000
            else:
                break
            self._begun.popleft()
            read.append((label, seconds))
        return read

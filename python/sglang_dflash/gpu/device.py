"""Times calls and graph replays with CUDA events. On a CPU the same code runs, but its times mean nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CALLS = 20  # per measured interval, so that an event's half microsecond is negligible


@dataclass(frozen=True, slots=True)
class Device:
    """Where the stages run. `dry`: on a CPU with Triton's interpreter and tiny shapes."""

    name: str
    dry: bool

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Captures `call` as a CUDA graph after a warm-up; returns its replay (no arguments, no result)."""
        if self.dry:
            return call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def median_us(self, call: Callable[[], Any], repeats: int = 15, calls: int = CALLS) -> float:
        """Microseconds per call: the median over intervals of `calls` back-to-back calls, after one warm-up call."""
        if self.dry:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e6
        call()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / calls)
        return statistics.median(times)

    def bandwidth(self) -> float:
        """Bytes per microsecond of a copy, bytes read plus bytes written."""
        size = 1 << 14 if self.dry else 1 << 31
        source = torch.empty(size, dtype=torch.uint8, device=self.name)
        target = torch.empty_like(source)
        return 2 * size / self.median_us(lambda: target.copy_(source), calls=1 if self.dry else 5)

    def describe(self) -> dict[str, Any]:
        import triton

        facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "dry": self.dry}
        if not self.dry:
            properties = torch.cuda.get_device_properties(0)
            facts |= {
                "device": properties.name,
                "capability": f"sm_{properties.major}{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_gb": round(properties.total_memory / 1e9, 1),
                "cuda": torch.version.cuda,
            }
        return facts


def pick(dry: bool) -> Device:
    if dry:
        torch.set_num_threads(1)
        return Device("cpu", True)
    if not torch.cuda.is_available():
        raise SystemExit("error: no GPU was found; --dry-run runs all stages with tiny shapes on a CPU.")
    return Device("cuda", False)

"""Counts the host's work per decode step in a trace of torch's profiler: launches, graphs, copies, waits."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

Event = dict[str, Any]
STEP = re.compile(r"step\[(VERIFY|DECODE|EXTEND|MIXED)\b.*")
"""SGLang's span around every forward of the target (ModelRunner.forward); a draft's span is named DRAFT."""
DECODING = ("step[VERIFY", "step[DECODE")
RUNTIME = ("cuda_runtime", "cuda_driver")
# Triton launches through the driver, torch through the runtime.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchCooperativeKernel")
GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")
COPIES = ("cudaMemcpy", "cuMemcpy")
FILLS = ("cudaMemset", "cuMemset")
WAITS = tuple(f"{api}{what}Synchronize" for api in ("cuda", "cu") for what in ("Stream", "Event", "Device", "Ctx"))
READS = "aten::_local_scalar_dense"  # .item(), int() and bool() of a tensor call this
DIRECTIONS = {"HtoD": "copies_h2d", "DtoH": "copies_d2h", "DtoD": "copies_d2d"}


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Counts per decode step, means over `steps`.

    Fields:
        span: SGLang's name of the step, with its batch size.
        host_ms: from the start of one target forward to the start of the next, profiler overhead included.
        launches: single kernel launches; graphs: graph launches; fills: memsets.
        copies_other: copies of unknown direction; pageable: copies with unpinned host memory, which block the host.
        waits: calls that block until the device is done; reads: `.item()` and similar calls that copied or waited.
        kernels: kernels on the device, those within graphs included.
        launched: kernel -> its single launches, the most frequent first.
    """

    span: str
    steps: int
    host_ms: float
    launches: float
    graphs: float
    copies_h2d: float
    copies_d2h: float
    copies_d2d: float
    copies_other: float
    pageable: float
    fills: float
    waits: float
    reads: float
    kernels: float
    launched: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_trace(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def count_steps(trace: dict[str, Any]) -> StepCounts:
    """Counts in the longest uninterrupted run of decode steps of one batch size.

    A step lasts from the start of one target forward to the start of the next. So the first step of a trace, which the
    profiler may have cut, and the last one are left out.

    Raises:
        ValueError: the trace has no two such steps in a row.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans = _steps(events)
    begin, end, steps = spans[0]["ts"], spans[-1]["ts"], len(spans) - 1
    calls = _outermost(e for e in events if e.get("cat") in RUNTIME and begin <= e["ts"] < end)
    reads = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == READS and begin <= e["ts"] < end]
    device = _by_correlation(e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    launches, copies = _named(calls, LAUNCHES), _named(calls, COPIES)
    copied = [_first_name(device, call) for call in copies]
    directions = Counter(_direction(name) for name in copied)
    launched = Counter(_short(_first_name(device, call)) for call in launches)
    per_step = {
        "launches": len(launches),
        "graphs": len(_named(calls, GRAPHS)),
        **{name: directions[name] for name in (*DIRECTIONS.values(), "copies_other")},
        "pageable": sum("Pageable" in name for name in copied),
        "fills": len(_named(calls, FILLS)),
        "waits": len(_named(calls, WAITS)),
        "reads": _containing(reads, _named(calls, COPIES + WAITS)),
        "kernels": sum(e["cat"] == "kernel" for call in calls for e in device.get(_correlation(call), ())),
    }
    return StepCounts(
        span=spans[0]["name"],
        steps=steps,
        host_ms=round((end - begin) / steps / 1e3, 3),
        **{name: round(count / steps, 2) for name, count in per_step.items()},
        launched={name: round(count / steps, 2) for name, count in launched.most_common()},
    )


def _steps(events: Iterable[Event]) -> list[Event]:
    spans = sorted(
        (e for e in events if e.get("cat") == "user_annotation" and STEP.match(e["name"])), key=lambda e: e["ts"]
    )
    runs = [list(run) for name, run in groupby(spans, lambda e: e["name"]) if name.startswith(DECODING)]
    longest = max(runs, key=len, default=[])
    if len(longest) < 2:
        raise ValueError(f"the trace has {len(longest)} decode steps of one batch size in a row; at least 2 are needed")
    return longest


def _outermost(calls: Iterable[Event]) -> list[Event]:
    """Drops calls nested in calls of the same thread: a launch by the runtime contains one by the driver."""
    kept: list[Event] = []
    ends: dict[Any, float] = {}
    for call in sorted(calls, key=lambda e: (e["ts"], -e.get("dur", 0))):
        thread = call.get("pid"), call.get("tid")
        if call["ts"] >= ends.get(thread, -1.0):
            kept.append(call)
            ends[thread] = call["ts"] + call.get("dur", 0)
    return kept


def _named(calls: Sequence[Event], prefixes: tuple[str, ...]) -> list[Event]:
    return [call for call in calls if call["name"].startswith(prefixes)]


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _by_correlation(events: Iterable[Event]) -> dict[Any, list[Event]]:
    found: dict[Any, list[Event]] = {}
    for event in events:
        if (correlation := _correlation(event)) is not None:
            found.setdefault(correlation, []).append(event)
    return found


def _first_name(device: dict[Any, list[Event]], call: Event) -> str:
    return next((event["name"] for event in device.get(_correlation(call), ())), "")


def _direction(name: str) -> str:
    return next((column for word, column in DIRECTIONS.items() if word in name), "copies_other")


def _short(kernel: str) -> str:
    """The kernel's name without its arguments, cut to 100 characters."""
    return kernel.removeprefix("void ").split("(")[0][:100] or "unknown"


def _containing(ops: Sequence[Event], calls: Sequence[Event]) -> int:
    """How many of `ops` contain one of `calls`, by time and thread."""
    threads: dict[Any, list[float]] = {}
    for call in calls:
        threads.setdefault((call.get("pid"), call.get("tid")), []).append(call["ts"])
    found = 0
    for op in ops:
        begins = sorted(threads.get((op.get("pid"), op.get("tid")), ()))
        found += bisect_right(begins, op["ts"] + op.get("dur", 0)) > bisect_right(begins, op["ts"])
    return found

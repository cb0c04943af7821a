"""Reports what steps verify: in the log, for Prometheus, and in `/server_info`, with the prefills."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from sglang.srt.runtime_context import get_observability, get_serving

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.core.row_counts import PREFILLED, SECONDS, STATE, RowCounts

logger = logging.getLogger(__name__)
METRICS = {
    "steps": "Decode steps.",
    "blocks": "Blocks that the draft filled.",
    "rows": "Rows of these blocks that were verified, without the anchors.",
    "promised": "Drafts that should be accepted by their chances.",
    "accepted": "Drafts that were accepted.",
    "copies": "Copies of which rows were verified.",
    "copied": "Tokens of copies that were accepted.",
}


class RowReport:
    """Says every `--decode-log-interval` steps what has happened since."""

    def __init__(self, counts: RowCounts) -> None:
        """counts: go on rising."""
        self._counts, self._said = counts, RowCounts()
        observability = get_observability()
        self._interval = max(observability.decode_log_interval, 1)
        self._add = _prometheus() if observability.enable_metrics else None

    def step(self) -> None:
        """A step has ended."""
        if self._counts.steps - self._said.steps < self._interval:
            return
        since, self._said = self._counts.since(self._said), replace(self._counts)
        if since.blocks or since.copies:
            logger.info("Rows: %s.", since)
        if self._add is not None:
            self._add(since)

    def state(self) -> dict[str, Any]:
        return asdict(self._counts)


def _prometheus() -> Callable[[RowCounts], None]:
    from prometheus_client import Counter  # reads, when imported, a variable that the host sets at its start

    labels = {"model_name": get_serving().served_model_name}
    counters = {
        name: Counter(f"sglang_dflash:rows_{name}", text, labelnames=list(labels)).labels(**labels)
        for name, text in METRICS.items()
    }

    def add(since: RowCounts) -> None:
        for name, counter in counters.items():
            counter.inc(getattr(since, name))

    return add


@hook(
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
    AROUND,
    why="`/server_info` knows nothing of verified rows and of the draft's prefills",
    until="stays",
)
def _add_rows(original: Any, controller: Any, state: dict[str, Any]) -> None:
    original(controller, state)
    worker = controller.scheduler.draft_worker
    report = getattr(worker, "row_report", None)
    if report is not None:
        state[STATE] = report.state()
    if hasattr(worker, "prefilled"):
        state[PREFILLED] = worker.prefilled
    seconds = getattr(worker, "step_seconds", None)
    if seconds is not None:
        state[SECONDS] = seconds._asdict()

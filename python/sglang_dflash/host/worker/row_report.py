"""Reports what steps verify: in the log and in `/server_info`, with the prefills."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from typing import Any

from sglang.srt.runtime_context import get_observability

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.core.row_counts import PREFILLED, SECONDS, STATE, RowCounts

logger = logging.getLogger(__name__)


class RowReport:
    """Says every `--decode-log-interval` steps what has happened since."""

    def __init__(self, counts: RowCounts) -> None:
        """counts: go on rising."""
        self._counts, self._said = counts, RowCounts()
        self._interval = max(get_observability().decode_log_interval, 1)

    def step(self) -> None:
        """A step has ended."""
        if self._counts.steps - self._said.steps < self._interval:
            return
        since, self._said = self._counts.since(self._said), replace(self._counts)
        if since.blocks or since.copies:
            logger.info("Rows: %s.", since)

    def state(self) -> dict[str, Any]:
        return asdict(self._counts)


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

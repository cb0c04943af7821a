"""Reports what the plan does: in the log, for Prometheus, in answers, and in `/server_info`, with the prefills."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

from sglang.srt.runtime_context import get_observability, get_serving

from sglang_dflash.core.plan_counts import PREFILLED, STATE, DepthCounts, PlanCounts
from sglang_dflash.host.hooking import AROUND, hook
from sglang_dflash.host.protocols import Req

logger = logging.getLogger(__name__)
METRICS = {
    "steps": "Decode steps that were planned.",
    "seconds": "Seconds of these steps.",
    "planning_s": "Seconds of these steps that the plan itself took.",
    "blocks": "Blocks that the draft filled.",
    "rows": "Rows of these blocks that were verified, without the anchors.",
    "depth": "Sum of the depths of their deepest rows.",
    "promised": "Drafts that should be accepted by the plan's chances.",
    "accepted": "Drafts that were accepted.",
    "copies": "Chains of copied tokens that were verified.",
    "copied_rows": "Rows of these chains, without the anchors.",
    "copied_promised": "Copied tokens that should be accepted by the plan's chances.",
    "copied_accepted": "Copied tokens that were accepted.",
}
DEPTH_METRICS = {
    "rows": "Rows of one depth that were verified.",
    "promised": "Of these rows, those that should be accepted by the plan's chances.",
    "accepted": "Of these rows, those that were accepted.",
}
ANSWER_FIELDS = {
    "rows": "dflash_rows_by_depth",
    "promised": "dflash_promised_by_depth",
    "accepted": "dflash_accepted_by_depth",
}
"""In `meta_info` of an answer, with `--enable-metrics`: each a list over the depths, from 1, of its verified rows."""


class PlanReport:
    """Says every `--decode-log-interval` steps what has happened since, and in answers, what their requests' rows were.

    Fields:
        of_answers: the report of this process, if metrics are on: what sends answers knows no worker.
    """

    of_answers: ClassVar[PlanReport | None] = None

    def __init__(
        self,
        counts: PlanCounts,
        settle: Callable[[], None] = lambda: None,
        request_ends: Callable[[str], list[DepthCounts]] = lambda request: [],
    ) -> None:
        """counts: the policy's own, which go on rising. settle, request_ends: see `Policy`."""
        self._counts, self._said, self._settle, self._request_ends = counts, PlanCounts(), settle, request_ends
        observability = get_observability()
        self._interval = max(observability.decode_log_interval, 1)
        self._add = _prometheus() if observability.enable_metrics else None
        PlanReport.of_answers = self if observability.enable_metrics else None

    def step(self) -> None:
        """A step has ended."""
        if self._counts.steps - self._said.steps < self._interval:
            return
        if self._add is not None:  # the log says nothing of depths, and blocks of the latest steps in its next line
            self._settle()
        since, self._said = self._counts.since(self._said), self._counts.copy()
        if since.blocks or since.copies:
            logger.info("Plan: %s.", since)
        if self._add is not None:
            self._add(since)

    def tell(self, reqs: list[Req], info: dict[str, list[Any]]) -> None:
        """Adds `ANSWER_FIELDS` to the pieces of answers to these requests, if one of them ends and had planned rows.
        A stream whose pieces hold new tokens only gets empty lists: SGLang would cut others, as if by tokens."""
        in_parts = get_serving().incremental_streaming_output
        ended = [self._request_ends(req.rid) if req.finished() else [] for req in reqs]
        told = [[] if in_parts and req.stream else rows for req, rows in zip(reqs, ended, strict=True)]
        if any(told):
            for count, name in ANSWER_FIELDS.items():
                info[name] = [[round(getattr(one, count), 4) for one in rows] for rows in told]

    def state(self) -> dict[str, Any]:
        self._settle()
        return asdict(self._counts)


def _prometheus() -> Callable[[PlanCounts], None]:
    from prometheus_client import Counter  # reads, when imported, a variable that the host sets at its start

    labels = {"model_name": get_serving().served_model_name}
    counters = {
        name: Counter(f"sglang_dflash:plan_{name}", text, labelnames=list(labels)).labels(**labels)
        for name, text in METRICS.items()
    }

    by_depth = {
        name: Counter(f"sglang_dflash:plan_depth_{name}", text, labelnames=[*labels, "depth"])
        for name, text in DEPTH_METRICS.items()
    }

    def add(since: PlanCounts) -> None:
        for name, counter in counters.items():
            counter.inc(getattr(since, name))
        for depth, one in enumerate(since.by_depth, start=1):
            for name, counter in by_depth.items():
                counter.labels(**labels, depth=str(depth)).inc(getattr(one, name))

    return add


@hook(
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
    AROUND,
    why="`/server_info` knows nothing of a plan and of the draft's prefills",
    until="stays",
)
def _add_plan(original: Any, controller: Any, state: dict[str, Any]) -> None:
    original(controller, state)
    worker = controller.scheduler.draft_worker
    report = getattr(worker, "plan_report", None)
    if report is not None:
        state[STATE] = report.state()
    if hasattr(worker, "prefilled"):
        state[PREFILLED] = worker.prefilled


@hook(
    "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.to_payload",
    AROUND,
    why="`meta_info` has no field for rows by depth",
    until="stays",
)
def _tell_rows(original: Any, streamed: Any, *arguments: Any, **named: Any) -> Any:
    """Each request that ends comes by once, wherever it ended."""
    if PlanReport.of_answers is not None:
        PlanReport.of_answers.tell(streamed.output_reqs, streamed.customized_info)
    return original(streamed, *arguments, **named)

"""Counts what steps verify and accept for Prometheus, and puts SGLang's accept rate right.

All counts are read from what SGLang copies to the CPU anyway, so no step waits for them.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_observability, get_spec

from sglang_cpu.hooking import AFTER, hook
from sglang_dflash.core.step_counts import COUNTERS, DRAFT_KV, LABELS, PREFIX, StepCounts
from sglang_dflash.host.start.version import serves_dflash


class StepMetrics:
    """The counters of one scheduler in `/metrics`. Every label has a series from the start, so that rates see zeros."""

    def __init__(self, worker: Any, labels: dict[str, Any], interval: int) -> None:
        """
        Args:
            worker: the DFLASH worker.
            labels: SGLang's own of this scheduler.
            interval: decode steps after which counts are written.
        """
        from prometheus_client import Counter  # reads, when imported, a variable that SGLang sets at its start

        self._worker, self._interval, self._steps = worker, interval, 0
        self._counts = StepCounts(worker.block_size, max(worker.step_rows.widths))
        counters = {
            name: Counter(f"{PREFIX}{name}", text, [*labels, *([LABELS[name]] if name in LABELS else [])])
            for name, text in COUNTERS.items()
        }
        self._series = [
            counters[name].labels(*labels.values(), *([label] if label else [])) for name, label, _ in self._values()
        ]
        self._written = [0] * len(self._series)

    def step(self, result: Any, reqs: list[Any]) -> None:
        """A step whose counts are on the CPU. Requests that had ended before it do not count, as happens under overlap:
        SGLang drops their tokens, too."""
        live = [place for place, req in enumerate(reqs) if not (req.finished() or req.is_retracted)]
        if not live:
            return
        width = result.speculative_num_draft_tokens
        lens = [width] * len(reqs) if result.cap_lens is None else result.cap_lens.tolist()
        accepted = result.num_correct_drafts_per_req_cpu
        self._counts.add([accepted[place] for place in live], [lens[place] for place in live])
        self._steps += 1
        if self._steps >= self._interval:
            self.flush()

    def flush(self) -> None:
        """Writes what is new."""
        self._steps = 0
        values = [count for _, _, count in self._values()]
        for series, count, before in zip(self._series, values, self._written, strict=True):
            if count != before:
                series.inc(count - before)
        self._written = values

    def _values(self) -> list[tuple[str, str, int]]:
        return [*self._counts.values(), (DRAFT_KV, "", self._worker.prefilled)]


@hook(
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.__post_init__",
    AFTER,
    why="SGLang has no counters of drafts, and labels of its own that ours must share",
    until="SGLang counts accepted drafts by position (issue 31750)",
)
def _start(_: None, reporter: Any) -> None:
    reporter.dflash_metrics = None
    if reporter.enable_metrics and reporter.is_stats_logging_rank and serves_dflash():
        interval = max(get_observability().decode_log_interval, 1)
        labels = reporter.metrics_collector.labels
        reporter.dflash_metrics = StepMetrics(reporter.scheduler.draft_worker, labels, interval)


@hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._resolve_spec_v2_tokens",
    AFTER,
    why="has a step's accepted drafts and rows on the CPU, and knows which requests had ended",
    until="SGLang counts accepted drafts by position (issue 31750)",
)
def _count(_: Any, processor: Any, result: Any, batch: Any) -> None:
    metrics = processor.metrics_reporter.dflash_metrics
    if metrics is not None:
        metrics.step(result, batch.reqs)


@hook(
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_prefill_stats",
    AFTER,
    why="a busy prefill server has no decode steps, after which its counts would be written",
    until="SGLang counts accepted drafts by position (issue 31750)",
)
@hook(
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter._maybe_log_idle_metrics",
    AFTER,
    why="the scheduler has nothing to do: counts of the last steps and prefills must not wait for the next request",
    until="SGLang counts accepted drafts by position (issue 31750)",
)
def _flush(_: None, reporter: Any, *arguments: Any, **more: Any) -> None:
    if reporter.dflash_metrics is not None:
        reporter.dflash_metrics.flush()


@hook(
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.update_spec_metrics",
    AFTER,
    why="SGLang divides accepted drafts by those of whole blocks, in the log and in `sglang:spec_accept_rate`",
    until="SGLang divides by the rows that were verified",
)
def set_accept_rate(_: None, reporter: Any, *arguments: Any, **more: Any) -> None:
    """Makes `spec_num_correct_drafts`, of which SGLang makes nothing but the rate, what gives the right one."""
    steps, rows = reporter.spec_num_forward_ct, reporter.spec_num_cap_tokens
    if not rows or not serves_dflash():  # 0 rows: blocks are whole
        return
    accepted = reporter.spec_num_accept_tokens - steps
    whole = steps * (get_spec().speculative_num_draft_tokens - 1)
    reporter.spec_num_correct_drafts = accepted * whole / (rows - steps) if rows > steps else 0


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
    AFTER,
    why="SGLang tells a request as if all its steps were whole blocks",
    until="SGLang counts the rows that were verified",
)
def set_proposed_drafts(_: None, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Puts `spec_num_proposed_drafts` and `spec_accept_rate` right where rows are counted."""
    if "spec_num_proposed_drafts" not in meta_info or not serves_dflash():
        return
    rows = recv_obj.spec_num_cap_tokens[i] if recv_obj.spec_num_cap_tokens else 0
    if not rows:  # whole blocks
        return
    proposed = rows - meta_info["spec_verify_ct"]
    meta_info["spec_num_proposed_drafts"] = proposed
    meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / proposed if proposed else 0.0

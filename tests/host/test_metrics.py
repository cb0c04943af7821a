"""Counters for Prometheus, and SGLang's accept rate made right, over SGLang's own classes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_dflash.core.step_counts import PREFIX
from sglang_dflash.host.worker import metrics

BLOCK = 8
LABELS = {"model_name": "tiny", "engine_type": "unified", "tp_rank": 0}


@pytest.fixture
def registry(monkeypatch) -> prometheus_client.CollectorRegistry:
    found = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "Counter", partial(prometheus_client.Counter, registry=found))
    return found


@pytest.fixture
def speculation(monkeypatch) -> SimpleNamespace:
    """What SGLang's functions and ours read of the server's arguments."""
    found = SimpleNamespace(speculative_num_draft_tokens=BLOCK, speculative_algorithm="DFLASH")
    for function in (SchedulerMetricsReporter.report_decode_stats, TokenizerManager._calculate_spec_decoding_metrics):
        monkeypatch.setitem(function.__globals__, "get_spec", lambda: found)
    monkeypatch.setattr(metrics, "get_spec", lambda: found)
    monkeypatch.setattr(metrics, "serves_dflash", lambda: found.speculative_algorithm == "DFLASH")
    return found


def result_of(accepted: list[int], lens: list[int] | None, width: int = BLOCK) -> SimpleNamespace:
    cap_lens = None if lens is None else torch.tensor(lens, dtype=torch.int32)
    return SimpleNamespace(
        num_correct_drafts_per_req_cpu=accepted, cap_lens=cap_lens, speculative_num_draft_tokens=width
    )


def req(ended: bool = False, retracted: bool = False) -> SimpleNamespace:
    return SimpleNamespace(finished=lambda: ended, is_retracted=retracted)


def make(interval: int = 2) -> tuple[metrics.StepMetrics, SimpleNamespace]:
    worker = SimpleNamespace(block_size=BLOCK, prefilled=0, step_rows=SimpleNamespace(widths=[BLOCK, 1]))
    return metrics.StepMetrics(worker, LABELS, interval), worker


def test_counters_have_sglangs_labels_and_what_is_new(registry):
    """Fails where a counter counts twice, lacks one of SGLang's labels, has no series before the first step, is written
    at each step, or never without a next step; also where a request that had ended is counted."""
    counting, worker = make()

    def value(name: str, **label: str) -> float | None:
        labels = {name: str(value) for name, value in LABELS.items()} | label
        return registry.get_sample_value(f"{PREFIX}{name}_total", labels)

    names = ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
    assert [value(name) for name in (*names, "draft_kv_tokens")] == [0] * 4
    assert [value("spec_decode_num_accepted_tokens_per_pos", position=str(p)) for p in range(BLOCK - 1)] == [0] * 7
    assert [value("spec_decode_num_steps", width=str(width)) for width in range(1, BLOCK + 1)] == [0] * BLOCK

    counting.step(result_of([3, 7, 5], None), [req(), req(ended=True), req(retracted=True)])  # whole blocks
    assert value("spec_decode_num_drafts") == 0, "written at each step"
    counting.step(result_of([0, 2], [1, 4], width=5), [req(), req()])
    assert [value(name) for name in names] == [2, 7 + 3, 3 + 2]
    assert value("spec_decode_num_request_steps") == 3
    positions = [value("spec_decode_num_accepted_tokens_per_pos", position=str(p)) for p in range(4)]
    assert positions == [2, 2, 1, 0]
    assert [value("spec_decode_num_steps", width=width) for width in "148"] == [0, 1, 1]

    worker.prefilled = 11
    counting.step(result_of([0], [1]), [req()])
    counting.step(result_of([4], None), [req(ended=True)])  # nobody is left
    metrics._flush(None, SimpleNamespace(dflash_metrics=counting))
    counting.flush()
    assert (value("draft_kv_tokens"), value("spec_decode_num_request_steps")) == (11, 4)
    assert value("spec_decode_num_steps", width="1") == 1


@pytest.mark.parametrize(
    ("enabled", "first", "algorithm", "counts"),
    [(True, True, "DFLASH", True), (False, True, "DFLASH", False), (True, False, "DFLASH", False), (True, True, "", 0)],
)
def test_who_counts(registry, speculation, monkeypatch, enabled, first, algorithm, counts):
    """Fails where a second rank counts the same steps, or a server without --enable-metrics or without DFLASH does."""
    speculation.speculative_algorithm = algorithm
    monkeypatch.setattr(metrics, "get_observability", lambda: SimpleNamespace(decode_log_interval=40))
    worker = SimpleNamespace(block_size=BLOCK, prefilled=0, step_rows=SimpleNamespace(widths=[BLOCK]))
    reporter = SimpleNamespace(
        enable_metrics=enabled,
        is_stats_logging_rank=first,
        scheduler=SimpleNamespace(draft_worker=worker),
        metrics_collector=SimpleNamespace(labels=LABELS),
    )
    metrics._start(None, reporter)
    assert (reporter.dflash_metrics is not None) == bool(counts)
    processor = SimpleNamespace(metrics_reporter=reporter)
    metrics._count(None, processor, result_of([1], None), SimpleNamespace(reqs=[req()]))
    metrics._flush(None, reporter)
    assert bool(list(registry.collect())) == bool(counts)


@pytest.mark.parametrize(
    ("steps", "accepted", "rows", "algorithm", "rate"),
    [
        (10, 12, 34, "DFLASH", 12 / 24),
        (10, 0, 10, "DFLASH", 0.0),  # plain steps
        (10, 35, 0, "DFLASH", 35 / 70),  # whole blocks: SGLang counts no rows
        (10, 12, 34, "DSPARK", 12 / 70),
    ],
)
def test_accept_rate_of_the_server(speculation, steps, accepted, rows, algorithm, rate):
    """Fails where SGLang's own arithmetic over a log interval gives another rate than accepted over verified drafts;
    where tau changes; or where another algorithm's rate changes."""
    speculation.speculative_algorithm = algorithm
    reporter: Any = SimpleNamespace()
    for name in ("accept_tokens", "correct_drafts", "forward_ct", "block_accept_tokens", "cap_tokens"):
        setattr(reporter, f"spec_num_{name}", 0)
    half = steps // 2
    for count, some, seen in (
        (half, accepted // 2, rows // 2),
        (steps - half, accepted - accepted // 2, rows - rows // 2),
    ):
        arguments = {"num_accept_tokens": some + count, "num_cap_tokens": seen}
        SchedulerMetricsReporter.update_spec_metrics(reporter, count, some, **arguments)
        metrics.set_accept_rate(None, reporter, count, some, **arguments)
    # As `report_decode_stats` computes them.
    assert reporter.spec_num_correct_drafts / (steps * (BLOCK - 1)) == pytest.approx(rate)
    assert reporter.spec_num_accept_tokens / reporter.spec_num_forward_ct == 1 + accepted / steps


@pytest.mark.parametrize(
    ("rows", "algorithm", "proposed"),
    [([34], "DFLASH", 24), ([10], "DFLASH", 0), ([0], "DFLASH", 70), ([], "DFLASH", 70), ([34], "DSPARK", 70)],
)
def test_proposed_drafts_of_a_request(speculation, rows, algorithm, proposed):
    """Fails where `meta_info` has other proposed drafts than were verified, or another rate than follows."""
    speculation.speculative_algorithm = algorithm
    accepted = min(12, proposed)
    answer = SimpleNamespace(
        spec_verify_ct=[10],
        spec_num_correct_drafts=[accepted],
        completion_tokens=[10 + accepted],
        spec_num_cap_tokens=rows,
        spec_correct_drafts_histogram=[[10]],
    )
    meta: dict[str, Any] = {}
    TokenizerManager._calculate_spec_decoding_metrics(None, meta, answer, 0)
    metrics.set_proposed_drafts(None, None, meta, answer, 0)
    assert meta["spec_num_proposed_drafts"] == proposed
    assert meta["spec_accept_rate"] == pytest.approx(accepted / proposed if proposed else 0.0)

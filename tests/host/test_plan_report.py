"""When the plan's counts are reported, and where."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import prometheus_client
import pytest

from sglang_dflash.core.plan_counts import PREFILLED, STATE, DepthCounts, PlanCounts
from sglang_dflash.host import plan_report


@pytest.fixture
def observability(monkeypatch):
    """What the server was started with."""
    options = SimpleNamespace(decode_log_interval=4, enable_metrics=False)
    monkeypatch.setattr(plan_report, "get_observability", lambda: options)
    monkeypatch.setattr(plan_report.PlanReport, "of_answers", None)
    return options


@pytest.fixture(autouse=True)
def serving(monkeypatch):
    """How it serves."""
    options = SimpleNamespace(served_model_name="tiny", incremental_streaming_output=False)
    monkeypatch.setattr(plan_report, "get_serving", lambda: options)
    return options


def take(counts: PlanCounts, report: plan_report.PlanReport, steps: int, blocks: int) -> None:
    for _ in range(steps):
        counts.steps += 1
        counts.blocks += blocks
        counts.rows += 3 * blocks
        report.step()


def test_the_log_speaks_at_intervals(observability, caplog):
    """Fails where each step is logged, where a line says what an earlier one said, or where steps without drafts fill
    the log."""
    caplog.set_level(logging.INFO, logger=plan_report.__name__)
    counts = PlanCounts()
    report = plan_report.PlanReport(counts)
    take(counts, report, 7, blocks=2)
    take(counts, report, 1, blocks=0)
    take(counts, report, 4, blocks=0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and said[0].startswith("Plan: 8 blocks in 4 steps, on average 3.00 rows and 0.00 deep;")
    assert said[1].startswith("Plan: 6 blocks in 4 steps")


def test_prometheus_gets_what_is_new(observability):
    """Fails where a counter counts twice, or lacks the model's name."""
    observability.enable_metrics = True
    counts = PlanCounts()
    report = plan_report.PlanReport(counts)
    counts.by_depth = [DepthCounts(8, 4.5, 4)]
    take(counts, report, 4, blocks=1)
    counts.by_depth = [DepthCounts(10, 5.5, 5), DepthCounts(2, 0.5, 1)]
    take(counts, report, 4, blocks=1)

    def value(name: str, **depth: str) -> float | None:
        labels = {"model_name": "tiny", **depth}
        return prometheus_client.REGISTRY.get_sample_value(f"sglang_dflash:plan_{name}_total", labels)

    assert (value("steps"), value("blocks"), value("rows"), value("accepted")) == (8, 8, 24, 0)
    assert set(plan_report.METRICS) == set(report.state()) - {"by_depth"}
    names = ("depth_rows", "depth_promised", "depth_accepted")
    assert [value(name, depth="1") for name in names] == [10, 5.5, 5]
    assert [value(name, depth="2") for name in names] == [2, 0.5, 1]


@pytest.mark.parametrize("metrics", [True, False])
def test_only_metrics_need_all_counts(observability, metrics, monkeypatch):
    """Fails where the log alone makes the plan settle its counts, which takes time, or where metrics lack the latest
    steps."""
    observability.enable_metrics = metrics
    monkeypatch.setattr(plan_report, "_prometheus", lambda: lambda since: None)
    counts, settled = PlanCounts(), []
    take(counts, plan_report.PlanReport(counts, settle=lambda: settled.append(counts.steps)), 8, blocks=1)
    assert settled == ([4, 8] if metrics else [])


def test_server_info_has_the_counts(observability):
    """Fails where `/server_info` lacks them or those by depth that wait, or fails on a server whose blocks are whole,
    or without speculation."""
    calls, counts, waiting = [], PlanCounts(steps=5), [DepthCounts(2, 0.5, 1)]
    report = plan_report.PlanReport(counts, settle=lambda: counts.by_depth.extend(waiting))
    for worker in (SimpleNamespace(plan_report=report), SimpleNamespace(plan_report=None), SimpleNamespace(), None):
        state: dict = {}
        controller = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker))
        plan_report._add_plan(lambda *arguments: calls.append(arguments), controller, state)
        assert calls.pop() == (controller, state)
        if getattr(worker, "plan_report", None) is None:
            assert not state
        else:
            shown = PlanCounts.from_json(state[STATE])
            assert (shown.steps, shown.by_depth) == (5, waiting)


def test_server_info_has_the_prefilled_tokens():
    """Fails where `/server_info` lacks how many prompt tokens got draft KV, with whole blocks or before any prompt."""
    for prefilled in (0, 7):
        state: dict = {}
        worker = SimpleNamespace(plan_report=None, prefilled=prefilled)
        controller = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker))
        plan_report._add_plan(lambda *arguments: None, controller, state)
        assert state == {PREFILLED: prefilled}


def test_an_answer_tells_its_rows(observability, serving, monkeypatch):
    """Fails where an answer tells another request's rows, tells them before its end, or where one without planned rows
    makes the lists of the others too short; also where SGLang would cut the lists, or where a plan learns early though
    metrics are off."""
    monkeypatch.setattr(plan_report, "_prometheus", lambda: lambda since: None)
    rows = {"a": [DepthCounts(3, 1.25, 2), DepthCounts(1, 0.123456, 0)], "b": [], "c": [DepthCounts(2, 0.5, 1)]}
    asked = []

    def told(names: str, metrics: bool = True, stream: bool = False) -> dict[str, list]:
        observability.enable_metrics = metrics
        plan_report.PlanReport(PlanCounts(), request_ends=lambda name: asked.append(name) or rows[name])
        reqs = [SimpleNamespace(rid=name, stream=stream, finished=lambda name=name: name != "c") for name in names]
        streamed = SimpleNamespace(output_reqs=reqs, customized_info={})
        assert plan_report._tell_rows(lambda streamed, dp_rank: dp_rank, streamed, dp_rank=3) == 3
        return streamed.customized_info

    expected = zip(plan_report.ANSWER_FIELDS.values(), ([3, 1], [1.25, 0.1235], [2, 0]), strict=True)
    fields = {name: [of_a, [], []] for name, of_a in expected}
    assert told("abc") == told("abc", stream=True) == fields
    assert told("bc") == told("abc", metrics=False) == {}
    assert asked == ["a", "b", "a", "b", "b"]
    serving.incremental_streaming_output = True
    assert told("abc") == fields and told("abc", stream=True) == {}

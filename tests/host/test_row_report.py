"""When the counts of rows are reported, and where."""

from __future__ import annotations

import logging
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_dflash.core.policy import StepSeconds
from sglang_dflash.core.row_counts import PREFILLED, SECONDS, STATE, RowCounts
from sglang_dflash.host.worker import row_report


@pytest.fixture
def observability(monkeypatch):
    """What the server was started with."""
    options = SimpleNamespace(decode_log_interval=4)
    monkeypatch.setattr(row_report, "get_observability", lambda: options)
    return options


def take(counts: RowCounts, report: row_report.RowReport, steps: int, blocks: int) -> None:
    for _ in range(steps):
        counts.steps += 1
        counts.blocks += blocks
        counts.rows += 3 * blocks
        report.step()


def test_the_log_speaks_at_intervals(observability, caplog):
    """Fails where each step is logged, where a line says what an earlier one said, or where steps without drafts fill
    the log."""
    caplog.set_level(logging.INFO, logger=row_report.__name__)
    counts = RowCounts()
    report = row_report.RowReport(counts)
    take(counts, report, 7, blocks=2)
    take(counts, report, 1, blocks=0)
    take(counts, report, 4, blocks=0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and said[0].startswith("Rows: 8 blocks in 4 steps, on average 3.00 rows;")
    assert said[1].startswith("Rows: 6 blocks in 4 steps")
    counts.add_copies(np.array([4, 1]), np.array([3, 1]))
    take(counts, report, 4, blocks=0)
    assert caplog.messages[-1] == "Rows: nothing was drafted in 4 steps; 1 copies, of which 2 tokens were accepted."


def test_server_info_has_the_counts(observability):
    """Fails where `/server_info` lacks them, or fails on a server whose blocks are whole, or without speculation."""
    calls, counts = [], RowCounts(steps=5, blocks=2)
    report = row_report.RowReport(counts)
    for worker in (SimpleNamespace(row_report=report), SimpleNamespace(row_report=None), SimpleNamespace(), None):
        state: dict = {}
        controller = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker))
        row_report._add_rows(lambda *arguments: calls.append(arguments), controller, state)
        assert calls.pop() == (controller, state)
        if getattr(worker, "row_report", None) is None:
            assert not state
        else:
            assert state[STATE] == asdict(counts)
            assert RowCounts.total([state[STATE]] * 2) == RowCounts(steps=10, blocks=4)


def test_server_info_has_the_prefilled_tokens():
    """Fails where `/server_info` lacks how many prompt tokens got draft KV, with whole blocks or before any prompt."""
    for prefilled in (0, 7):
        state: dict = {}
        worker = SimpleNamespace(row_report=None, prefilled=prefilled)
        controller = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker))
        row_report._add_rows(lambda *arguments: None, controller, state)
        assert state == {PREFILLED: prefilled}


def test_server_info_has_the_times_of_steps():
    """Fails where `/server_info` lacks them once they are known, or fails before."""
    for seconds, said in ((None, {}), (StepSeconds(0.01, 0.03), {SECONDS: {"plain": 0.01, "block": 0.03}})):
        state: dict = {}
        worker = SimpleNamespace(row_report=None, step_seconds=seconds)
        controller = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker))
        row_report._add_rows(lambda *arguments: None, controller, state)
        assert state == said

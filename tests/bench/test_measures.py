"""Measures of recorded requests, checked against numbers computed by hand and against numpy."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from samples import accepting, key, record

from sglang_dflash.bench.measures import by_turn, measure
from sglang_dflash.bench.records import Cell, Limits, Record, total_acceptance
from sglang_dflash.serving.completion import drafted


def failed(session: str = "broken") -> Record:
    return record(session, first_s=None, end_s=9.0, tokens=0, finish="", failure="timed out")


def measured(*records: Record, wall_s: float = 2.0, limits: Limits | None = None) -> dict[str, float]:
    return measure(Cell(key(), list(records), wall_s), limits)


def test_times_of_a_request() -> None:
    """Fails if TTFT counts from the cell's start, or TPOT counts the first token or its wait."""
    one = record(start_s=5.0, first_s=5.2, end_s=6.1, tokens=10)
    assert one.ttft_s == pytest.approx(0.2)
    assert one.tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize("fields", [{"tokens": 1}, {"first_s": None, "tokens": 0}])
def test_no_tpot(fields: dict[str, object]) -> None:
    """Fails if a request without a second token gets a time per token."""
    assert record(**fields).tpot_s is None


def test_percentiles_are_numpys() -> None:
    """Fails for another interpolation, or if requests must come sorted."""
    seconds = [random.Random(seed).uniform(0.1, 4) for seed in range(11)]
    got = measured(*(record(str(i), first_s=value, end_s=9.0) for i, value in enumerate(seconds)))
    for share in (50, 90, 99):
        assert got[f"ttft_ms_p{share}"] == pytest.approx(1e3 * np.percentile(seconds, share))


def test_measures_of_known_requests() -> None:
    """Fails if speed is not tokens over wall time, or a user's speed excludes the wait for the first token."""
    quick = record("a", first_s=0.1, end_s=1.0, tokens=10)
    slow = record("b", start_s=0.5, first_s=0.8, end_s=2.5, tokens=18)
    single = record("c", first_s=0.5, end_s=0.5, tokens=1)
    got = measured(quick, slow, single, wall_s=2.5)
    assert got["tok_s"] == pytest.approx(29 / 2.5)
    assert got["user_tok_s"] == pytest.approx(9.0)  # of 10, 9 and 2
    assert got["ttft_ms_p50"] == pytest.approx(300.0)
    assert got["ttft_ms_p99"] == pytest.approx(np.percentile([100, 300, 500], 99))
    assert got["tpot_ms_p90"] == pytest.approx(100.0)  # the single token has none
    assert (got["requests"], got["failed"], got["tokens"]) == (3, 0, 29)
    assert (got["prompt_tokens"], math.isnan(got["cached_tokens"])) == (60, True)


def test_failures_are_counted_and_left_out() -> None:
    """Fails if the times or tokens of a failed request affect the measures."""
    alone, both = measured(record()), measured(record(), failed())
    assert (both["requests"], both["failed"]) == (2, 1)
    assert {**both, "requests": 1, "failed": 0} == pytest.approx(alone, nan_ok=True)


def test_only_failures() -> None:
    """Fails if a cell without an answer has a speed or raises."""
    got = measured(failed(), wall_s=0.0)
    assert math.isnan(got["tok_s"]) and math.isnan(got["ttft_ms_p50"]) and math.isnan(got["tau"])


def test_cached_tokens() -> None:
    """Fails if requests without a count make the sum unknown, or zero counts as unknown."""
    assert measured(record(cached_tokens=7), record(cached_tokens=None))["cached_tokens"] == 7
    assert measured(record(cached_tokens=0))["cached_tokens"] == 0


def test_goodput() -> None:
    """Fails if a limit is not applied, a single token breaks the TPOT limit, or a failure counts as good."""
    requests = [
        record("good", first_s=0.1, end_s=1.0),
        record("late", first_s=0.6, end_s=1.0),
        record("slow", first_s=0.1, end_s=3.0),
        record("single", first_s=0.2, end_s=0.2, tokens=1),
        failed(),
    ]
    for limits, good in [(Limits(500, 150), 2), (Limits(500), 3), (Limits(None, 150), 3), (Limits(), 4)]:
        assert measured(*requests, wall_s=4.0, limits=limits)["goodput_rps"] == pytest.approx(good / 4)
    assert "goodput_rps" not in measured(*requests)


def test_acceptance_of_unequal_histograms() -> None:
    """Fails if shorter histograms are cut or misaligned, or requests without steps count."""
    long = record("a", steps=6, drafted=18, accept_histogram=[1, 2, 0, 3])
    short = record("b", steps=3, drafted=9, accept_histogram=[2, 1])
    held = total_acceptance([long, short, record("c"), failed()])
    assert held is not None
    assert (held.steps, held.drafted, held.accepted, held.by_position) == (9, 27, 12, [6, 3, 3])
    assert held.tau == pytest.approx(1 + 12 / 9)
    assert total_acceptance([record()]) is None


def test_acceptance_measures() -> None:
    """Fails if shares are not relative to the verify steps."""
    got = measure(Cell(key(), [record()], 1.0, accepting(8, 4, 1, steps=10, drafts=3)))
    assert got["tau"] == pytest.approx(2.3)
    assert [got["accept_1"], got["accept_2"], got["accept_3"]] == pytest.approx([0.8, 0.4, 0.1])


def test_what_was_not_computed() -> None:
    """Fails if a draft's share is taken from the target's, or exists without counters or after a failed request."""
    requests = [record(prompt_tokens=30, cached_tokens=12), record("b", prompt_tokens=50, cached_tokens=8)]
    got = measure(Cell(key(), requests, 1.0, prefilled=48))
    assert (got["cached_share"], got["draft_cached_share"]) == (20 / 80, pytest.approx(32 / 80))
    broken = measure(Cell(key(), [*requests, failed()], 1.0, prefilled=48))
    unknown = measure(Cell(key(), requests, 1.0))
    assert math.isnan(broken["draft_cached_share"]) and math.isnan(unknown["draft_cached_share"])
    assert math.isnan(measured()["cached_share"])


def test_by_turn() -> None:
    """Fails if turns are mixed, failures are counted, or tau or the cached share is a mean over requests."""
    requests = [
        record("a", 0, prompt_tokens=10, cached_tokens=0, steps=4, accept_histogram=[4]),
        record("b", 0, prompt_tokens=30, cached_tokens=4, steps=1, accept_histogram=[0, 0, 1]),
        record("a", 1, 3.0, first_s=3.4, end_s=5.0, prompt_tokens=50),
        failed(),
    ]
    table = by_turn(Cell(key(), requests, 6.0))
    assert list(table.index) == [0, 1]
    turns = table.to_dict("index")
    assert (turns[0]["prompt_tokens"], turns[0]["cached_share"]) == (20, 4 / 40)
    assert turns[0]["tau"] == pytest.approx(1 + 2 / 5)
    assert turns[1]["ttft_ms_p50"] == pytest.approx(400)
    assert turns[1]["tok_s"] == pytest.approx(5.0)
    assert math.isnan(turns[1]["tau"]) and math.isnan(turns[1]["cached_share"])


def test_drafts_of_steps_with_widths_of_their_own():
    """Fails where drafts beyond a step's width are counted, as SGLang does for steps narrower than a block."""
    whole = {"spec_num_proposed_drafts": 35}
    assert drafted(whole) == 35
    assert drafted(whole | {"spec_cap_lens_histogram": [0, 2, 0, 0, 1, 0, 0, 0, 2]}) == 0 * 2 + 3 + 7 * 2
    assert drafted({}) == 0

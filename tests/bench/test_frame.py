"""A run on disk and as one table: measures, round trip, median and range of repeats, speedups, withheld rows."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from samples import accepting, cell, key, record, run, small_sweep, unequal

from sglang_dflash.bench.frame import GROUP, frame, measure
from sglang_dflash.bench.records import SCHEMA, Cell, Equality, Run
from sglang_dflash.serving.records import Record


def rows(*cells: Cell) -> dict[str, dict[str, object]]:
    table = frame(run(list(cells)))
    return {str(row["arm"]): row.to_dict() for _, row in table.iterrows()}


def measured(*records: Record, wall_s: float = 2.0, **fields: object) -> dict[str, float]:
    return measure(Cell(key(), list(records), wall_s, **fields))


def test_round_trip(tmp_path: Path) -> None:
    """Fails if a field of a run, cell, record, acceptance or equality is lost or changes its type on disk."""
    held = small_sweep((0.5, 2), 1)
    held.cells.append(cell("dflash", 100, load=2, equality=unequal(examples=["a/0: token 3"]), failure="it died"))
    held.cells[-1].log_tail, held.cells[-1].answers = ["Traceback", "boom"], [record(ids=[1, 2], text="x")]
    held.notes, held.servers = ["shared machine"], [{"arm": "off", "start_s": 3.5}]
    held.save(tmp_path / "deep" / "run.json")
    assert Run.load(tmp_path / "deep" / "run.json") == held
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run.json"]
    assert held.done() == {one.key for one in held.cells[:-1]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "Expecting value"),
        ("[1]", "schema"),
        (json.dumps({"schema": SCHEMA - 1, "cells": []}), f"schema {SCHEMA}"),
        (
            json.dumps({"schema": SCHEMA, "cells": [{"key": {}}], "command": "", "workload": "", "options": {}}),
            "record",
        ),
        (json.dumps({"schema": SCHEMA, "cells": [], "command": "", "workload": "agent", "options": {}, "x": 1}), "'x'"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    """Fails if a file of another kind is accepted, or refused without its name and the reason."""
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a results file of this benchmark") as error:
        Run.load(path)
    assert str(path) in str(error.value) and said in str(error.value)
    with pytest.raises(ValueError, match=r"The results file .* does not exist"):
        Run.load(tmp_path / "absent.json")


def test_percentiles_are_numpys() -> None:
    """Fails for another interpolation, or if requests must come sorted."""
    seconds = [random.Random(seed).uniform(0.1, 4) for seed in range(11)]
    got = measured(*(record(str(i), first_s=value, end_s=9.0) for i, value in enumerate(seconds)))
    for share in (50, 90, 99):
        assert got[f"ttft_ms_p{share}"] == pytest.approx(1e3 * np.percentile(seconds, share))


def test_measures_of_known_requests() -> None:
    """Fails if speed is not tokens over wall time, or a user's speed excludes the wait for the first token."""
    quick = record("a", first_s=0.1, end_s=1.0, tokens=10)
    slow = record("b", start_s=0.5, first_s=0.8, end_s=2.5, tokens=18, cached_tokens=30)
    single = record("c", first_s=0.5, end_s=0.5, tokens=1)
    failed = record("d", first_s=None, end_s=9.0, tokens=0, failure="timed out")
    got = measured(quick, slow, single, failed, wall_s=2.5)
    assert got["tok_s"] == pytest.approx(29 / 2.5)
    assert got["user_tok_s"] == pytest.approx(9.0)  # of 10, 9 and 2
    assert got["ttft_ms_p50"] == pytest.approx(300.0)
    assert got["tpot_ms_p90"] == pytest.approx(100.0)  # the single token has none
    assert (got["requests"], got["failed"], got["tokens"], got["prompt_tokens"]) == (4, 1, 29, 60)
    assert got["cached_share"] == pytest.approx(0.5)
    nothing = measured(failed, wall_s=0.0)
    assert all(math.isnan(nothing[name]) for name in ("tok_s", "ttft_ms_p50", "tau", "cached_share"))


def test_the_drafts_cache() -> None:
    """Fails if prompt tokens that the draft computed count as cached, or an incomplete cell has a share."""
    assert measured(record(), record("b"), prefilled=10)["draft_cached_share"] == pytest.approx(0.75)
    assert math.isnan(measured(record(), record("b", failure="x"), prefilled=10)["draft_cached_share"])


def test_goodput() -> None:
    """Fails if a request that misses one limit counts, or one without a second token misses TPOT's."""
    good, late = record("a"), record("b", first_s=0.3)
    slow, single = record("c", end_s=3.0), record("d", tokens=1)
    held = Cell(key(), [good, late, slow, single, record("e", failure="x")], 2.0)
    assert measure(held, {"ttft_ms": 200.0, "tpot_ms": 110.0})["goodput_rps"] == pytest.approx(1.0)
    assert measure(held, {"ttft_ms": None, "tpot_ms": 110.0})["goodput_rps"] == pytest.approx(1.5)
    assert "goodput_rps" not in measure(held)


def test_repeats_fold_to_median_and_range() -> None:
    """Fails if repeats are averaged, or speedups are ratios of medians instead of paired by repeat."""
    speeds = {"off": (100, 200, 50), "dflash": (300, 250, 200)}
    got = rows(*(cell(arm, held[i], repeat=i) for i in range(3) for arm, held in speeds.items()))["dflash"]
    assert [got["tok_s"], got["tok_s_low"], got["tok_s_high"]] == pytest.approx([250, 200, 300])
    assert [got["speedup_off"], got["speedup_off_low"], got["speedup_off_high"]] == pytest.approx([3, 1.25, 4])
    assert got["repeats"] == 3 and math.isnan(float(str(got["speedup_builtin"])))


def test_baselines_of_backends() -> None:
    """Fails if a speedup uses another backend's baseline although that of its own exists, or if another engine gets no
    speedup over the only baseline, or one over one of several."""
    fa3, triton = cell("off", 100, backend="fa3"), cell("off", 400, backend="triton")
    vllm, dflash = cell("vllm", 200), cell("dflash", 200, backend="triton")
    assert rows(fa3, triton, dflash)["dflash"]["speedup_off"] == pytest.approx(0.5)
    assert rows(fa3, vllm)["vllm"]["speedup_off"] == pytest.approx(2)
    assert math.isnan(float(str(rows(fa3, triton, vllm)["vllm"]["speedup_off"])))


@pytest.mark.parametrize("other", [{"load": 2}, {"dataset": "mt-bench"}, {"radix": False}, {"repeat": 1}])
def test_no_baseline_elsewhere(other: dict[str, object]) -> None:
    """Fails if a speedup is taken across loads, datasets, cache settings or repeats."""
    assert math.isnan(float(str(rows(cell("off", 100, **other), cell("dflash", 200))["dflash"]["speedup_off"])))


def test_one_unequal_repeat_withholds_the_row() -> None:
    """Fails if a withheld row shows speeds of its other repeats or speedups over it. Its tau stays; a repeat without a
    pass of its own has none."""
    judged = {"acceptance": accepting(10, steps=10, drafts=1), "equality": unequal(3)}
    got = rows(
        *(cell("off", 100, repeat=i) for i in range(3)),
        *(cell("builtin", 200, repeat=i, **(judged if i == 1 else {})) for i in range(3)),
        *(cell("dflash", 250, repeat=i) for i in range(3)),
    )
    for name in ("tok_s", "tok_s_high", "user_tok_s", "ttft_ms_p50", "tpot_ms_p99", "speedup_off"):
        assert math.isnan(float(str(got["builtin"][name]))), name
    assert math.isnan(float(str(got["dflash"]["speedup_builtin"])))
    assert (got["builtin"]["withheld"], got["builtin"]["different"], got["builtin"]["compared"]) == (True, 3, 48)
    assert got["builtin"]["tau"] == pytest.approx(2) and not got["dflash"]["withheld"]


def test_other_engines_are_not_withheld() -> None:
    """Fails if unequal tokens between engines hide the speed."""
    got = rows(cell("off", 100), cell("vllm", 200, equality=Equality("off", False, 10, 4, different=6)))["vllm"]
    assert not got["withheld"] and not got["same_engine"] and got["tok_s"] == pytest.approx(200)


def test_failed_cells() -> None:
    """Fails if a failed cell adds numbers, or the repeats that succeeded are lost."""
    got = rows(cell("off", 100), cell("off", 900, repeat=1, failure="it died"), cell("dflash", 900, failure="no start"))
    assert (got["off"]["repeats"], got["off"]["failed_repeats"], got["off"]["failure"]) == (1, 1, "it died")
    assert got["off"]["tok_s"] == pytest.approx(100)
    assert (got["dflash"]["repeats"], got["dflash"]["failure"]) == (0, "no start")
    assert math.isnan(float(str(got["dflash"]["tok_s"])))


def test_rows_are_in_the_runs_order() -> None:
    """Fails if rows are sorted, a group has two rows, or a run without cells lacks the columns to group by."""
    cells = [cell(arm, 100, radix=radix) for radix in (True, False) for arm in ("off", "dflash")]
    table = frame(run(cells))
    assert list(table["arm"]) == ["off", "dflash", "off", "dflash"]
    assert list(table["radix"]) == [True, True, False, False]
    assert frame(run([])).empty and list(frame(run([])).columns) == GROUP

"""A run on disk and as one table: round trip, refused files, median and range of repeats, speedups, withheld rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from samples import accepting, agent, cell, realistic, run, unequal

from sglang_dflash.bench.frame import GROUP, frame
from sglang_dflash.bench.records import SCHEMA, Cell, Equality, Run


def rows(*cells: Cell) -> dict[str, dict[str, object]]:
    table = frame(run(list(cells)))
    return {str(row["arm"]): row.to_dict() for _, row in table.iterrows()}


def test_round_trip(tmp_path: Path) -> None:
    """Fails if a field of a run, cell, record, acceptance or equality is lost or changes its type on disk."""
    held = realistic(arms=("off", "vllm"), loads=(0.5, 2), repeats=1)
    held.cells.append(cell("dflash", 100, load=2, equality=unequal(examples=["a/0: token 3"]), failure="it died"))
    held.cells[-1].log_tail = ["Traceback", "boom"]
    held.notes, held.servers = ["shared machine"], [{"arm": "off", "start_s": 3.5}]
    held.save(tmp_path / "deep" / "run.json")
    assert Run.load(tmp_path / "deep" / "run.json") == held
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["run.json"]


def test_done_leaves_out_failures() -> None:
    """Fails if a failed cell counts as measured in a resumed run."""
    good, bad = cell("off", 100), cell("dflash", 100, failure="it died")
    assert run([good, bad]).done() == {good.key}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "Expecting value"),
        ("[1]", "not a JSON object"),
        ("{}", "schema"),
        (json.dumps({"schema": SCHEMA + 1, "cells": []}), f"schema {SCHEMA}"),
        (json.dumps({"schema": SCHEMA, "cells": [{"key": {}}], "command": "", "workload": "", "options": {}}), "arm"),
        (json.dumps({"schema": SCHEMA, "cells": [], "command": "", "workload": "agent", "options": {}, "x": 1}), "'x'"),
        (json.dumps({"schema": SCHEMA, "cells": [], "command": "", "workload": "burst", "options": {}}), "'burst'"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    """Fails if a file of another kind is accepted, or refused without its name and the reason."""
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a results file of this benchmark") as error:
        Run.load(path)
    assert str(path) in str(error.value) and said in str(error.value)


def test_absent_file_is_refused(tmp_path: Path) -> None:
    """Fails if a missing file gives a traceback."""
    with pytest.raises(ValueError, match=r"The results file .* does not exist"):
        Run.load(tmp_path / "run.json")


def test_repeats_fold_to_median_and_range() -> None:
    """Fails if repeats are averaged, or speedups are ratios of medians instead of paired by repeat."""
    speeds = {"off": (100, 200, 50), "dflash": (300, 250, 200)}
    got = rows(*(cell(arm, held[i], repeat=i) for i in range(3) for arm, held in speeds.items()))["dflash"]
    assert [got["tok_s"], got["tok_s_low"], got["tok_s_high"]] == pytest.approx([250, 200, 300])
    assert [got["speedup_off"], got["speedup_off_low"], got["speedup_off_high"]] == pytest.approx([3, 1.25, 4])
    assert got["repeats"] == 3 and math.isnan(float(str(got["speedup_builtin"])))


def test_even_number_of_repeats() -> None:
    """Fails if the median of two repeats is one of them."""
    assert rows(cell("off", 100), cell("off", 200, repeat=1))["off"]["tok_s"] == pytest.approx(150)


def test_baseline_is_of_the_same_backend() -> None:
    """Fails if a speedup uses another backend's baseline although that of its own backend exists."""
    cells = [cell("off", 100, backend="fa3"), cell("off", 400, backend="triton"), cell("dflash", 200, backend="triton")]
    assert rows(*cells)["dflash"]["speedup_off"] == pytest.approx(0.5)


def test_other_engines_have_the_only_baseline() -> None:
    """Fails if another engine gets no speedup over the only baseline, or a speedup over one of several baselines."""
    vllm, fa3, triton = cell("vllm", 200), cell("off", 100, backend="fa3"), cell("off", 400, backend="triton")
    assert rows(fa3, vllm)["vllm"]["speedup_off"] == pytest.approx(2)
    assert math.isnan(float(str(rows(fa3, triton, vllm)["vllm"]["speedup_off"])))


@pytest.mark.parametrize("other", [{"load": 2}, {"dataset": "mt-bench"}, {"radix": False}, {"repeat": 1}])
def test_no_baseline_elsewhere(other: dict[str, object]) -> None:
    """Fails if a speedup is taken across loads, datasets, cache settings or repeats."""
    assert math.isnan(float(str(rows(cell("off", 100, **other), cell("dflash", 200))["dflash"]["speedup_off"])))


def test_one_unequal_repeat_withholds_the_row() -> None:
    """Fails if a withheld row shows speeds of its other repeats or speedups over it. Its tau stays."""
    tau = {"acceptance": accepting(10, steps=10, drafts=1)}
    got = rows(
        *(cell("off", 100, repeat=i) for i in range(3)),
        *(cell("builtin", 200, repeat=i, equality=unequal(3 * (i == 1)), **tau) for i in range(3)),
        *(cell("dflash", 250, repeat=i) for i in range(3)),
    )
    for name in ("tok_s", "tok_s_high", "user_tok_s", "ttft_ms_p50", "tpot_ms_p99", "speedup_off"):
        assert math.isnan(float(str(got["builtin"][name]))), name
    assert math.isnan(float(str(got["dflash"]["speedup_builtin"])))
    assert (got["builtin"]["withheld"], got["builtin"]["different"], got["builtin"]["compared"]) == (True, 3, 144)
    assert got["builtin"]["tau"] == pytest.approx(2)
    assert not got["dflash"]["withheld"]


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
    """Fails if rows are sorted, or a group has two rows."""
    table = frame(agent(arms=("off", "dflash")))
    assert list(table["arm"]) == ["off", "dflash", "off", "dflash"]
    assert list(table["radix"]) == [True, True, False, False]


def test_nothing_measured() -> None:
    """Fails if a run without cells raises, or its table lacks the columns that tables and plots group by."""
    table = frame(run([]))
    assert table.empty and list(table.columns) == GROUP

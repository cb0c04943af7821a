"""Comparison of two runs: matching of rows, and marks for changes that exceed the spread of the repeats."""

from __future__ import annotations

import io
import math
import random

import pytest
from rich.console import Console
from samples import accepting, cell, realistic, run, unequal

from sglang_dflash.bench.compare import MEASURES, Noise, compare, comparison_console, comparison_markdown, differences
from sglang_dflash.bench.records import Cell, Equality, Run


def repeated(arm: str, *speeds: float, **fields: object) -> list[Cell]:
    return [cell(arm, tok_s, repeat=i, **fields) for i, tok_s in enumerate(speeds)]


def report(a: Run, b: Run) -> str:
    return comparison_markdown(a, b, compare(a, b))


def marked(change: float, noise: float, repeats: int = 3, cells: int = 40, runs: int = 60, ratio: float = 1.0) -> float:
    """Share of marked cells if b is `change` times a. A cell's noise is between `noise` and `ratio * noise`."""
    rng = random.Random(7)
    found = 0
    for _ in range(runs):
        scales = [noise * ratio ** rng.random() for _ in range(cells)]
        a = [[rng.lognormvariate(5, scale) for _ in range(repeats)] for scale in scales]
        b = [[change * rng.lognormvariate(5, scale) for _ in range(repeats)] for scale in scales]
        pooled = Noise.of([*a, *b])
        found += sum(pooled.exceeded(one, other) for one, other in zip(a, b, strict=True))
    return found / (cells * runs)


@pytest.mark.parametrize(("repeats", "cells"), [(2, 40), (3, 40), (3, 6), (5, 40)])
def test_same_code_is_hardly_ever_marked(repeats: int, cells: int) -> None:
    """Fails if noise marks 1% of the cells. Disjoint ranges alone would mark 10% with three repeats."""
    assert marked(1.0, 0.05, repeats, cells, runs=5000 // cells) < 0.01


def test_unequal_noise_is_hardly_ever_marked() -> None:
    """Fails if noisy cells are judged by the noise of the quiet ones: 2% to 12% here."""
    assert marked(1.0, 0.02, ratio=6) < 0.015


@pytest.mark.parametrize(("change", "noise", "share"), [(1.2, 0.05, 0.87), (0.8, 0.05, 0.95), (1.2, 0.03, 0.99)])
def test_true_changes_are_found(change: float, noise: float, share: float) -> None:
    """Fails if the rule is so strict that a change of 20% goes unseen."""
    assert marked(change, noise) > share


def test_whole_runs() -> None:
    """Fails if the rule is not applied to each measure with its own noise and direction."""
    a, same, faster = (realistic(seed=seed, factor=factor) for seed, factor in ((1, 1), (2, 1), (3, 1.2)))
    unchanged = compare(a, same)
    assert sum((unchanged[f"{name}_mark"] != "").sum() for name in MEASURES) <= 2
    changed = compare(a, faster)
    sped, off = changed[changed["arm"] != "off"], changed[changed["arm"] == "off"]
    for name in ("tok_s", "tpot_ms_p50"):
        assert (sped[f"{name}_mark"] == "better").mean() > 0.95
        assert not (off[f"{name}_mark"] == "better").any()
    back = compare(faster, a)
    assert (back[back["arm"] != "off"]["tok_s_mark"] == "worse").mean() > 0.95


def test_overlap_is_never_marked() -> None:
    """Fails if overlapping ranges are marked as a change because their medians are far apart."""
    steady = Noise(1e-6, 100)
    assert not steady.exceeded([100, 101, 160], [159, 200, 210])
    assert not steady.exceeded([100] * 20 + [125], [120] * 20 + [126])
    assert steady.exceeded([100] * 20 + [119], [120] * 20 + [126])
    assert steady.exceeded([100, 101, 102], [159, 200, 210])


def test_a_cells_own_noise_counts() -> None:
    """Fails if the noise of a noisy cell is marked as a change because the rest of the run is quiet."""
    assert not Noise(1e-6, 100).exceeded([100, 150, 200], [210, 300, 400])


def test_floor() -> None:
    """Fails if a change below FLOOR is marked because it has no noise."""
    steady = Noise(1e-12, 100)
    assert not steady.exceeded([100, 100.1], [101.5, 101.6])
    assert steady.exceeded([100, 100.1], [103, 103.1])


def test_without_noise() -> None:
    """Fails if repeats without any noise, such as those of tau, raise or are never marked."""
    runs = []
    for accepted in (10, 20):
        held = {"acceptance": accepting(accepted, steps=20, drafts=1)}
        runs.append(run(repeated("dflash", 100, 100, 100, **held)))
    row = compare(*runs).iloc[0]
    assert (row["tau_a"], row["tau_b"], row["tau_mark"], row["tok_s_mark"]) == (1.5, 2.0, "better", "")


def test_single_repeat_is_not_marked_and_said() -> None:
    """Fails if a single repeat, whose spread is unknown, gets a mark, or the report does not mention it."""
    a, b = run(repeated("off", 100)), run(repeated("off", 900, 901, 902))
    assert compare(a, b).iloc[0]["tok_s_mark"] == ""
    assert "1 of 1 rows have only one repeat in a run, so nothing in them is marked." in report(a, b)


def test_latency_is_better_when_lower() -> None:
    """Fails if a higher TTFT is marked better."""
    row = compare(run(repeated("off", 200, 200, 200)), run(repeated("off", 100, 100, 100))).iloc[0]
    assert (row["ttft_ms_p50_ratio"], row["ttft_ms_p50_mark"]) == (pytest.approx(2), "worse")
    assert (row["tok_s_ratio"], row["tok_s_mark"]) == (pytest.approx(0.5), "worse")


def test_report() -> None:
    """Fails if the row, its mark or the note on a drifting machine changes."""
    a = run([*repeated("off", 100, 100), *repeated("dflash", 200, 200)])
    b = run([*repeated("off", 50, 50), *repeated("dflash", 200, 200)])
    text = report(a, b)
    assert "| dataset | load | arm | tok/s | TTFT p50 (ms) | TPOT p50 (ms) | tau |" in text
    assert "| gsm8k | concurrency 1 | off | 100 -> 50.0, **0.500x worse** | 2,500 -> 5,000, **2.00x worse** |" in text
    assert "| gsm8k | concurrency 1 | dflash | 200 -> 200, 1.00x |" in text
    assert "off ran 0.500x as fast in b as in a" in text
    assert "off ran" not in report(a, a)


def test_rows_that_cannot_be_compared_are_named() -> None:
    """Fails if a row that only one run has, a withheld row or a failed row is compared or silently dropped."""
    a = [cell("off", 100), cell("builtin", 773, equality=unequal()), cell("dflash", 200), cell("eagle3", 150)]
    b = [cell("off", 100), cell("builtin", 773), cell("dflash", 773, failure="it died"), cell("off", 773, 8)]
    text = report(run(a), run(b))
    rows = compare(run(a), run(b))
    assert rows[rows["state"] != ""][[f"{name}_{side}" for name in MEASURES for side in "ab"]].isna().all(axis=None)
    assert "773" not in text
    for line in (
        "* gsm8k, concurrency 1, builtin: withheld in a: unequal tokens",
        "* gsm8k, concurrency 1, dflash: failed in b",
        "* gsm8k, concurrency 1, eagle3: not in b",
        "* gsm8k, concurrency 8, off: not in a",
    ):
        assert line in text.splitlines()
    assert [line.split("|")[3].strip() for line in text.splitlines() if line.startswith("| gsm8k")] == ["off"]


def test_withheld_rows_lend_no_noise() -> None:
    """Fails if a row that is not compared adds to the noise of the others."""
    loud = repeated("builtin", 100, 900, 5000, equality=unequal())
    a = run([*repeated("off", 100, 101, 102), *loud])
    b = run([*repeated("off", 120, 121, 122), *repeated("builtin", 100, 900, 5000)])
    assert compare(a, b).iloc[0]["tok_s_mark"] == "better"


def test_differences_are_named() -> None:
    """Fails if a different option, version or machine fact is not named, or the load average is."""
    a, b = run([cell("off", 100)]), run([cell("off", 100)])
    a.options, b.options = {"max_new_tokens": 256, "limits": {"ttft_ms": 1}}, {"max_new_tokens": 512, "limits": None}
    a.versions, b.versions = {"sglang": "0.5.23"}, {"sglang": "0.5.23", "vllm": "0.32.0"}
    a.machine, b.machine = {"cpu": "x", "load_1min": 0.1}, {"cpu": "x", "load_1min": 4.0}
    assert differences(a, b) == [
        "option max_new_tokens: 256 in a, 512 in b",
        "option limits.ttft_ms: 1 in a, absent in b",
        "version vllm: absent in a, 0.32.0 in b",
    ]
    assert "They differ in:\n\n* option max_new_tokens" in report(a, b)


def test_backends_and_caches_are_told_apart() -> None:
    """Fails if rows with different backends or cache settings look the same."""
    held = run(
        [cell("off", 100, backend=backend, radix=radix) for backend in ("fa3", "triton") for radix in (True, False)]
    )
    assert "| gsm8k | concurrency 1 | off | triton | cache off |" in report(held, held)


def test_shares_stand_beside_speeds_of_other_tokens() -> None:
    """Fails if an engine whose tokens may differ is compared without the share of identical requests."""
    cells = [repeated("vllm", 100, 100, equality=Equality("off", False, 40, same)) for same in (30, 36)]
    a, b = (run([*repeated("off", 50, 50), *held]) for held in cells)
    assert "| vllm | 100 -> 100, 1.00x | 2,500 -> 2,500, 1.00x | 7.51 -> 7.51, 1.00x | - | 75.0% -> 90.0% |" in report(
        a, b
    )
    assert "identical" not in report(run(repeated("off", 50)), run(repeated("off", 50)))


def test_workloads_must_agree() -> None:
    """Fails if concurrency is compared with request rates."""
    with pytest.raises(ValueError, match="the first run's workload is closed, the second's open-loop"):
        compare(run([]), run([], "open-loop"))


def test_console() -> None:
    """Fails if the terminal shows no ratio, or interprets markup in names."""
    a, b = run(repeated("my[red]arm", 100, 101)), run(repeated("my[red]arm", 200, 201))
    screen = Console(width=160, file=io.StringIO())
    screen.print(comparison_console(a, b, compare(a, b)))
    assert "my[red]arm" in screen.file.getvalue() and "2.00x better" in screen.file.getvalue()


def test_nothing_to_compare() -> None:
    """Fails if runs without cells raise."""
    assert "No row can be compared." in report(run([]), run([]))
    assert math.isnan(Noise.of([]).variance)

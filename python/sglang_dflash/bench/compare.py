"""Compares two runs and marks changes that exceed the spread of their repeats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from scipy.stats import t as student

from sglang_dflash.bench.frame import GROUP, group_of, measured, withheld_groups
from sglang_dflash.bench.layout import escaped, grid, load_words, number
from sglang_dflash.bench.records import CellKey, Equality, Limits, Run

# Measure -> its title, and whether higher is better.
MEASURES = {
    "tok_s": ("tok/s", True),
    "ttft_ms_p50": ("TTFT p50 (ms)", False),
    "tpot_ms_p50": ("TPOT p50 (ms)", False),
    "tau": ("tau", True),
}
FALSE_MARKS = 0.007  # significance level of the t-test
FLOOR = 0.02  # a relative change up to this is not marked
# Facts of a machine that differ between any two runs.
_PASSING = {"load_1min"}
_Values = dict[tuple[object, ...], list[float]]


@dataclass(frozen=True, slots=True)
class Noise:
    """Spread of the repeats of a cell, pooled over cells: variance of the logarithm and its degrees of freedom."""

    variance: float
    freedom: int

    @classmethod
    def of(cls, groups: Iterable[Sequence[float]]) -> Noise:
        held = [(len(group) - 1, variance(map(math.log, group))) for group in groups if len(group) > 1]
        freedom = sum(count for count, _ in held)
        return cls(sum(count * spread for count, spread in held) / freedom if freedom else math.nan, freedom)

    def exceeded(self, a: Sequence[float], b: Sequence[float]) -> bool:
        """Whether b differs from a by more than the spread. All of these must hold:

        * both have at least two repeats;
        * the ranges over the repeats do not overlap. This alone is too weak: with three repeats of the same code on
          each side, one comparison in ten has disjoint ranges;
        * the medians differ by more than FLOOR;
        * a t-test on the logarithms is significant at FALSE_MARKS. It uses the larger of two noises: that of all cells
          of both runs (six values alone say too little about noise) and that of this cell (some are noisier than most).

        With three repeats and 5% noise this marks about 0.5% of unchanged cells and 90% of cells that are 20% faster;
        with 3% noise, nearly all of the latter. If the whole machine drifts between the runs, that counts as a change.
        """
        if min(len(a), len(b)) < 2:
            return False
        apart = max(a) < min(b) or max(b) < min(a)
        if not apart or abs(median(b) / median(a) - 1) <= FLOOR:
            return False
        own = Noise.of([a, b])
        scale = max(self.variance, own.variance) * (1 / len(a) + 1 / len(b))
        change = fmean(map(math.log, b)) - fmean(map(math.log, a))
        return abs(change) > student.ppf(1 - FALSE_MARKS / 2, self.freedom) * math.sqrt(scale)


def compare(a: Run, b: Run) -> pd.DataFrame:
    """
    Returns:
        One row per GROUP of either run. `state`: "" or why the row is not compared (withheld, failed, only in one). For
        each measure of MEASURES: `name_a` and `name_b` (medians over the repeats), `name_ratio` (b over a) and
        `name_mark`: better or worse if the change exceeds the spread (see `Noise.exceeded`), else "". A number that
        does not exist is NaN; a row with a state has no numbers. `identical_a`, `identical_b`: share of requests with
        the reference arm's tokens, if they may differ; else NaN. `repeats_a`, `repeats_b`: repeats with a result.

    Raises:
        ValueError: the runs have different workloads, whose loads mean different things.
    """
    if a.workload != b.workload:
        raise ValueError(
            f"--compare: the first run's workload is {a.workload}, the second's {b.workload}; they must be equal."
        )
    cells_a, cells_b = _cells(a), _cells(b)
    values = {name: (_by_group(cells_a, name), _by_group(cells_b, name)) for name in MEASURES}
    states, shares = _states(a, b), {"a": _shares(a), "b": _shares(b)}
    noises = {
        name: Noise.of([*_compared(of_a, states), *_compared(of_b, states)]) for name, (of_a, of_b) in values.items()
    }
    rows = []
    for group, state in states.items():
        row: dict[str, object] = {**dict(zip(GROUP, group, strict=True)), "state": state}
        for side, cells in (("a", cells_a), ("b", cells_b)):
            row[f"repeats_{side}"] = sum(group_of(key) == group for key in cells)
            row[f"identical_{side}"] = shares[side].get(group, math.nan)
        for name, (of_a, of_b) in values.items():
            pair = ([], []) if state else (of_a.get(group, []), of_b.get(group, []))
            row |= _change(name, *pair, noises[name])
        rows.append(row)
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=[*GROUP, "state"])


def _cells(run: Run) -> dict[CellKey, dict[str, float]]:
    limits = run.options.get("limits")
    return measured(run.cells, Limits(**limits) if limits else None)


def _by_group(cells: dict[CellKey, dict[str, float]], name: str) -> _Values:
    held: _Values = {}
    for key, values in cells.items():
        if values[name] > 0:  # False for NaN, too
            held.setdefault(group_of(key), []).append(values[name])
    return held


def _compared(values: _Values, states: dict[tuple[object, ...], str]) -> list[list[float]]:
    return [held for group, held in values.items() if not states[group]]


def _states(a: Run, b: Run) -> dict[tuple[object, ...], str]:
    groups = [dict.fromkeys(group_of(cell.key) for cell in run.cells) for run in (a, b)]
    failed = [{group_of(cell.key) for cell in run.cells if cell.failure} for run in (a, b)]
    withheld = [withheld_groups(run.cells) for run in (a, b)]
    states = {}
    for group in dict.fromkeys([*groups[0], *groups[1]]):
        said = []
        for name, there, lost, hidden in zip("ab", groups, failed, withheld, strict=True):
            if group not in there:
                said.append(f"not in {name}")
            elif group in hidden:
                said.append(f"withheld in {name}: unequal tokens")
            elif group in lost:
                said.append(f"failed in {name}")
        states[group] = ", ".join(said)
    return states


def _shares(run: Run) -> dict[tuple[object, ...], float]:
    judged: dict[tuple[object, ...], list[Equality]] = {}
    for cell in run.cells:
        if cell.equality is not None and not cell.equality.same_engine and cell.equality.compared:
            judged.setdefault(group_of(cell.key), []).append(cell.equality)
    return {group: sum(e.identical for e in held) / sum(e.compared for e in held) for group, held in judged.items()}


def _change(name: str, a: list[float], b: list[float], noise: Noise) -> dict[str, object]:
    before, after = (median(held) if held else math.nan for held in (a, b))
    mark = ""
    if a and b and noise.exceeded(a, b):
        mark = "better" if (after > before) == MEASURES[name][1] else "worse"
    return {f"{name}_a": before, f"{name}_b": after, f"{name}_ratio": after / before, f"{name}_mark": mark}


def differences(a: Run, b: Run) -> list[str]:
    """One sentence per option, version and machine fact that differs: each may explain a change."""
    said = []
    for title, one, other in (
        ("option", a.options, b.options),
        ("version", a.versions, b.versions),
        ("machine", a.machine, b.machine),
    ):
        first, second = _flat(one), _flat(other)
        for name in dict.fromkeys([*first, *second]):
            if first.get(name) != second.get(name) and not (title == "machine" and name in _PASSING):
                said.append(f"{title} {name}: {first.get(name, 'absent')} in a, {second.get(name, 'absent')} in b")
    return said


def _flat(held: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, entry in held.items():
        flat |= _flat(entry, f"{prefix}{name}.") if isinstance(entry, dict) else {f"{prefix}{name}": entry}
    return flat


def _rule(rows: pd.DataFrame) -> list[str]:
    """How to read the marks."""
    compared = rows[rows["state"] == ""] if "state" in rows else rows
    said = [
        "Ratios are b over a. A change is marked if the ranges over the repeats do not overlap, the medians differ by "
        f"more than {FLOOR:.0%}, and noise alone would cause it with a probability below {FALSE_MARKS:.1%}."
    ]
    single = int((compared[["repeats_a", "repeats_b"]].min(axis=1) < 2).sum()) if len(compared) else 0
    if single:
        said.append(f"{single} of {len(compared)} rows have only one repeat in a run, so nothing in them is marked.")
    off = compared[compared["arm"] == "off"]["tok_s_ratio"].dropna() if len(compared) else []
    if len(off) and abs(median(off) - 1) > FLOOR:
        said.append(
            f"off ran {number(median(off))}x as fast in b as in a: the machine or its load changed. Compare the runs' "
            "speedups over off, not their tok/s."
        )
    return said


def comparison_markdown(a: Run, b: Run, rows: pd.DataFrame) -> str:
    """The comparison as Markdown; marks are bold.

    Args:
        rows: `compare(a, b)`.
    """
    commands = "\n".join(
        f"* {name}: `{' '.join(run.command.replace('`', '').split())}`" for name, run in zip("ab", (a, b), strict=True)
    )
    blocks = ["# Comparison of two runs", commands, _bullets("They differ in:", differences(a, b)), *_rule(rows)]
    names = _names(rows)
    compared = rows[rows["state"] == ""]
    share = _has_shares(compared)
    header = [*names, *(title for title, _ in MEASURES.values()), *["identical"] * share]
    lines = [
        [*map(escaped, _key(a, row, names)), *(_cell(row, name, bold=True) for name in MEASURES), *[_same(row)] * share]
        for _, row in compared.iterrows()
    ]
    blocks.append(grid(header, lines) if lines else "No row can be compared.")
    blocks.append(_bullets("Not compared:", _left_out(a, rows)))
    return "\n\n".join(block for block in blocks if block) + "\n"


def comparison_console(a: Run, b: Run, rows: pd.DataFrame) -> RenderableType:
    """The comparison for a terminal.

    Args:
        rows: `compare(a, b)`.
    """
    names = _names(rows)
    shown = Table(header_style="bold")
    for name in names:
        shown.add_column(name)
    compared = rows[rows["state"] == ""]
    share = _has_shares(compared)
    for title in [*(title for title, _ in MEASURES.values()), *["identical"] * share]:
        shown.add_column(title, justify="right")
    for _, row in compared.iterrows():
        marks = [{"better": "green", "worse": "red"}.get(str(row[f"{name}_mark"]), "") for name in MEASURES]
        cells = [Text(_cell(row, name), style=mark) for name, mark in zip(MEASURES, marks, strict=True)]
        shown.add_row(*map(Text, _key(a, row, names)), *cells, *[_same(row)] * share)
    above = [Text(f"differs: {sentence}") for sentence in differences(a, b)]
    below = [Text(f"not compared: {sentence}") for sentence in _left_out(a, rows)]
    return Group(*above, shown, *below, *map(Text, _rule(rows)))


def _names(rows: pd.DataFrame) -> list[str]:
    """The parts of GROUP that distinguish the rows."""
    always = ("dataset", "arm", "load")
    order = ["dataset", "load", "arm", "backend", "radix"]
    return [name for name in order if name in always or rows[name].nunique() > 1]


def _key(run: Run, row: pd.Series, names: list[str]) -> list[str]:
    words = {"load": load_words(run, row["load"]), "radix": "on" if row["radix"] else "cache off"}
    return [words.get(name, str(row[name])) or "-" for name in names]


def _cell(row: pd.Series, name: str, bold: bool = False) -> str:
    """For example `412 -> 501, 1.22x better`."""
    before, after, mark = row[f"{name}_a"], row[f"{name}_b"], row[f"{name}_mark"]
    if not math.isfinite(before) or not math.isfinite(after):
        return "-"
    ratio = f"{number(row[f'{name}_ratio'])}x" + (f" {mark}" if mark else "")
    return f"{number(before)} -> {number(after)}, " + (f"**{ratio}**" if bold and mark else ratio)


def _has_shares(rows: pd.DataFrame) -> bool:
    return not rows.empty and bool(rows[["identical_a", "identical_b"]].notna().any(axis=None))


def _same(row: pd.Series) -> str:
    """Shares of requests with the reference arm's tokens in a and b; `-` without a share."""
    shares = [row["identical_a"], row["identical_b"]]
    return " -> ".join("-" if math.isnan(share) else f"{share:.1%}" for share in shares)


def _left_out(run: Run, rows: pd.DataFrame) -> list[str]:
    names = _names(rows)
    return [f"{', '.join(_key(run, row, names))}: {row['state']}" for _, row in rows.iterrows() if row["state"]]


def _bullets(title: str, sentences: list[str]) -> str:
    return "\n".join([title, "", *(f"* {escaped(sentence)}" for sentence in sentences)]) if sentences else ""

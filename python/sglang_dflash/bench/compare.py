"""Compares two runs and marks changes that exceed the spread of their repeats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from scipy.stats import t as student

from sglang_dflash.bench.frame import GROUP, cell_frame
from sglang_dflash.bench.layout import escaped, grid, number
from sglang_dflash.bench.records import Run

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


@dataclass(frozen=True, slots=True)
class Noise:
    """Spread of the repeats of a cell, pooled over cells: variance of the logarithm and its degrees of freedom."""

    variance: float
    freedom: int

    @classmethod
    def of(cls, groups: Iterable[Sequence[float]]) -> Noise:
        held = [(len(group) - 1, np.var(np.log(group), ddof=1)) for group in groups if len(group) > 1]
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
        if not apart or abs(np.median(b) / np.median(a) - 1) <= FLOOR:
            return False
        scale = max(self.variance, Noise.of([a, b]).variance) * (1 / len(a) + 1 / len(b))
        change = np.mean(np.log(b)) - np.mean(np.log(a))
        return bool(abs(change) > student.ppf(1 - FALSE_MARKS / 2, self.freedom) * math.sqrt(scale))


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
    sides = {"a": cell_frame(a), "b": cell_frame(b)}
    table = pd.concat([cells[GROUP] for cells in sides.values()]).drop_duplicates(ignore_index=True)
    groups = pd.MultiIndex.from_frame(table)
    for side, cells in sides.items():
        table[f"state_{side}"] = _states(cells, groups, side)
        table[f"repeats_{side}"] = _of_groups(cells[cells["failure"] == ""].groupby(GROUP).size(), groups).fillna(0)
        free = (
            cells[cells["judged"] & ~cells["same_engine"].astype(bool)].groupby(GROUP)[["identical", "compared"]].sum()
        )
        shares = free["identical"] / free["compared"].where(free["compared"] > 0)
        table[f"identical_{side}"] = _of_groups(shares, groups)
    states = table.pop("state_a") + ", " + table.pop("state_b")
    table.insert(len(GROUP), "state", states.str.strip(", "))
    comparable = groups[(table["state"] == "").to_numpy()]
    for name in MEASURES:
        of_a, of_b = (_values(cells, name, comparable) for cells in sides.values())
        noise = Noise.of([*of_a.values(), *of_b.values()])
        rows = [_change(name, of_a.get(group, []), of_b.get(group, []), noise) for group in groups]
        table = table.join(pd.DataFrame(rows, columns=[f"{name}_{part}" for part in ("a", "b", "ratio", "mark")]))
    return table


def _of_groups(held: pd.Series, groups: pd.MultiIndex) -> pd.Series:
    return held.reindex(groups).reset_index(drop=True)


def _states(cells: pd.DataFrame, groups: pd.MultiIndex, side: str) -> pd.Series:
    """By group: why it cannot be compared on this side, or ""."""
    found = cells.assign(failed=cells["failure"] != "").groupby(GROUP)[["withheld", "failed"]].any().reindex(groups)
    words = pd.Series("", index=groups).mask(found["failed"].eq(True), f"failed in {side}")
    words = words.mask(found["withheld"].eq(True), f"withheld in {side}: unequal tokens")
    return words.mask(found["failed"].isna(), f"not in {side}").reset_index(drop=True)


def _values(cells: pd.DataFrame, name: str, groups: pd.MultiIndex) -> dict[tuple[object, ...], list[float]]:
    """The repeats' values by group."""
    if name not in cells:
        return {}
    known = cells[cells[name] > 0]  # False for NaN, too
    return {group: list(held) for group, held in known.groupby(GROUP)[name] if group in groups}


def _change(name: str, a: list[float], b: list[float], noise: Noise) -> tuple[float, float, float, str]:
    before, after = (float(np.median(held)) if held else math.nan for held in (a, b))
    mark = ""
    if noise.exceeded(a, b):
        mark = "better" if (after > before) == MEASURES[name][1] else "worse"
    return before, after, after / before, mark


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
            if (first.get(name) or None) != (second.get(name) or None) and not (
                title == "machine" and name in _PASSING
            ):
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
    if len(off) and abs(off.median() - 1) > FLOOR:
        said.append(
            f"off ran {number(off.median())}x as fast in b as in a: the machine or its load changed. Compare the runs' "
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
    words = {"load": run.kind.words(row["load"]), "radix": "on" if row["radix"] else "cache off"}
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

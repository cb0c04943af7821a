"""Makes one table of a run: a row per arm, backend, cache, dataset and load, with median and range of the repeats."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd

from sglang_dflash.bench.measures import measure
from sglang_dflash.bench.records import Cell, CellKey, Limits, Run

GROUP = ["arm", "backend", "radix", "dataset", "load"]
BASELINES = ("off", "builtin")
SPEEDS = ("tok_s", "user_tok_s", "ttft_ms", "tpot_ms", "goodput_rps")


def frame(run: Run) -> pd.DataFrame:
    """
    Returns:
        One row per GROUP, in the run's order. Columns besides GROUP: for each measure (see `measures.measure`) `name`
        (median of the repeats), `name_low` and `name_high`; `speedup_off` and `speedup_builtin` with `_low` and `_high`
        (paired by repeat with that arm at the same backend, cache, dataset and load); `repeats` (those with a result);
        `failed_repeats` and `failure` (the first failure's sentence, or ""); `compared`, `identical`, `ties`,
        `different`, `unjudged` and `reference` (equality, summed over the repeats); `same_engine`; `withheld` (tokens
        of some repeat are unequal: speeds and speedups of the row are NaN). Without cells: the columns of GROUP, no
        rows.
    """
    limits = run.options.get("limits")
    cells = measured(run.cells, Limits(**limits) if limits else None)
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in {cell.key: cell for cell in run.cells}.values():
        groups.setdefault(group_of(cell.key), []).append(cell)
    rows = [_row(group, kept, cells) for group, kept in groups.items()]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=GROUP)


def measured(cells: Iterable[Cell], limits: Limits | None) -> dict[CellKey, dict[str, float]]:
    """The measures of every cell that did not fail. Unequal tokens in one repeat make all repeats' speeds NaN."""
    kept = list(cells)
    withheld = withheld_groups(kept)
    found = {}
    for cell in kept:
        if cell.failure:
            continue
        values = measure(cell, limits)
        if group_of(cell.key) in withheld:
            values = {name: math.nan if name.startswith(SPEEDS) else value for name, value in values.items()}
        found[cell.key] = values
    return found


def withheld_groups(cells: Iterable[Cell]) -> set[tuple[object, ...]]:
    """Groups with unequal tokens in at least one repeat."""
    return {group_of(cell.key) for cell in cells if cell.equality is not None and cell.equality.withheld}


def group_of(key: CellKey) -> tuple[object, ...]:
    """The values of GROUP."""
    return tuple(getattr(key, name) for name in GROUP)


def _row(group: tuple[object, ...], cells: list[Cell], values: dict[CellKey, dict[str, float]]) -> dict[str, object]:
    row: dict[str, object] = dict(zip(GROUP, group, strict=True))
    of_cells = [values[cell.key] for cell in cells if cell.key in values]
    row["repeats"] = len(of_cells)
    row["failed_repeats"] = sum(bool(cell.failure) for cell in cells)
    row["failure"] = next((cell.failure for cell in cells if cell.failure), "")
    for name in dict.fromkeys(name for one in of_cells for name in one):
        row |= _spread(name, [one.get(name, math.nan) for one in of_cells])
    for baseline in BASELINES:
        row |= _spread(f"speedup_{baseline}", [_speedup(cell.key, baseline, values) for cell in cells])
    judged = [cell.equality for cell in cells if cell.equality is not None]
    row["reference"] = judged[0].reference if judged else ""
    for name in ("compared", "identical", "ties", "different", "unjudged"):
        row[name] = sum(getattr(equality, name) for equality in judged)
    row["same_engine"] = bool(judged) and all(equality.same_engine for equality in judged)
    row["withheld"] = any(equality.withheld for equality in judged)
    return row


def _speedup(key: CellKey, baseline: str, values: dict[CellKey, dict[str, float]]) -> float:
    # Other engines have no SGLang attention backend: compare them with the baseline if it has only one.
    theirs = [
        other
        for other in values
        if other.arm == baseline
        and (other.radix, other.dataset, other.load, other.repeat) == (key.radix, key.dataset, key.load, key.repeat)
    ]
    same = [other for other in theirs if other.backend == key.backend] or (theirs if len(theirs) == 1 else [])
    if not same or key not in values:
        return math.nan
    return values[key]["tok_s"] / values[same[0]]["tok_s"]


def _spread(name: str, values: list[float]) -> dict[str, float]:
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return {name: math.nan, f"{name}_low": math.nan, f"{name}_high": math.nan}
    middle = len(known) // 2
    centre = known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2
    return {name: centre, f"{name}_low": known[0], f"{name}_high": known[-1]}

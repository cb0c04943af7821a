"""Makes tables of a run: a row per cell; per arm, backend, cache, dataset and load; and per turn of agent sessions."""

from __future__ import annotations

import math
from dataclasses import asdict

import pandas as pd

from sglang_dflash.bench.measures import by_turn, measure
from sglang_dflash.bench.records import Cell, Limits, Run

GROUP = ["arm", "backend", "radix", "dataset", "load"]
BASELINES = ("off", "builtin")
SPEEDS = ("tok_s", "user_tok_s", "ttft_ms", "tpot_ms", "goodput_rps")
COUNTS = ["compared", "identical", "ties", "different", "unjudged"]
_PLACE = ["radix", "dataset", "load", "repeat"]
_NOT_MEASURED = [*GROUP, "repeat", "failure", "reference", *COUNTS, "judged", "same_engine", "withheld"]


def cell_frame(run: Run) -> pd.DataFrame:
    """
    Returns:
        One row per cell: the fields of its key, `failure`, its equality, its measures (see `measures.measure`; NaN if
        it failed) and its speedups. `withheld`: unequal tokens in some repeat make all repeats' speeds NaN.
    """
    limits = run.options.get("limits")
    latest = {cell.key: cell for cell in run.cells}.values()
    rows = [_cell(cell, Limits(**limits) if limits else None) for cell in latest]
    if not rows:
        return pd.DataFrame(columns=_NOT_MEASURED)
    table = pd.DataFrame(rows)
    table["withheld"] = table.groupby(GROUP)["withheld"].transform("any")
    table.loc[table["withheld"], [name for name in table if name.startswith(SPEEDS)]] = math.nan
    for baseline in BASELINES if "tok_s" in table else ():
        table[f"speedup_{baseline}"] = table["tok_s"] / _baseline(table, baseline)
    return table


def _cell(cell: Cell, limits: Limits | None) -> dict[str, object]:
    judged = cell.equality
    return {
        **asdict(cell.key),
        "failure": cell.failure,
        "reference": judged.reference if judged else "",
        **{name: getattr(judged, name) if judged else 0 for name in COUNTS},
        "judged": judged is not None,
        "same_engine": judged is not None and judged.same_engine,
        "withheld": judged is not None and judged.withheld,
        **({} if cell.failure else measure(cell, limits)),
    }


def _baseline(table: pd.DataFrame, arm: str) -> pd.Series:
    """The baseline's tok/s in the same place.

    Other engines have no SGLang attention backend: they are compared with the baseline if it has only one.
    """
    rows = table[(table["arm"] == arm) & (table["failure"] == "")]
    same = rows.set_index([*_PLACE, "backend"])["tok_s"]
    only = rows.drop_duplicates(_PLACE, keep=False).set_index(_PLACE)["tok_s"]
    found = same.reindex(pd.MultiIndex.from_frame(table[[*_PLACE, "backend"]])).set_axis(table.index)
    other = only.reindex(pd.MultiIndex.from_frame(table[_PLACE])).set_axis(table.index)
    has_same = pd.MultiIndex.from_frame(table[[*_PLACE, "backend"]]).isin(same.index)
    return found.where(has_same, other)


def frame(run: Run) -> pd.DataFrame:
    """
    Returns:
        One row per GROUP, in the run's order. Columns besides GROUP: for each measure (see `measures.measure`) `name`
        (median of the repeats), `name_low` and `name_high`; `speedup_off` and `speedup_builtin` with `_low` and `_high`
        (paired by repeat with that arm at the same backend, cache, dataset and load); `repeats` (those with a result);
        `failed_repeats` and `failure` (the first failure's sentence, or ""); COUNTS and `reference` (equality, summed
        over the repeats); `same_engine`; `withheld` (tokens of some repeat are unequal: speeds and speedups of the row
        are NaN). Without cells: the columns of GROUP, no rows.
    """
    cells = cell_frame(run)
    if cells.empty:
        return pd.DataFrame(columns=GROUP)
    groups = cells.assign(failed_repeats=cells["failure"] != "").groupby(GROUP, sort=False)
    counts = groups["failed_repeats"].sum()
    found = {"repeats": groups.size() - counts, "failed_repeats": counts, "failure": groups["failure"].agg(_first)}
    measures = [name for name in cells if name not in _NOT_MEASURED]
    middle, low, high = groups[measures].median(), groups[measures].min(), groups[measures].max()
    for name in measures:
        found |= {name: middle[name], f"{name}_low": low[name], f"{name}_high": high[name]}
    found["reference"] = groups["reference"].agg(_first)
    found |= dict(groups[COUNTS].sum().items())
    judged = cells[cells["judged"]].groupby(GROUP)["same_engine"].all()
    found["same_engine"] = judged.reindex(counts.index, fill_value=False)
    found["withheld"] = groups["withheld"].any()
    return pd.DataFrame(found).reset_index()


def _first(texts: pd.Series) -> str:
    """The first text that is not empty."""
    return next(filter(None, texts), "")


def turn_frame(run: Run) -> pd.DataFrame:
    """
    Returns:
        One row per GROUP and `turn` (1 first), in the run's order: the measures of `measures.by_turn`, each the median
        of the repeats, and `withheld`; the speeds of withheld rows are NaN. Failed cells have no rows.
    """
    turns = [
        by_turn(cell).reset_index().assign(**{name: getattr(cell.key, name) for name in GROUP})
        for cell in run.cells
        if not cell.failure
    ]
    if not turns:
        return pd.DataFrame(columns=[*GROUP, "turn"])
    table = pd.concat(turns).assign(turn=lambda rows: rows["turn"] + 1)
    table = table.groupby([*GROUP, "turn"], sort=False).median().reset_index()
    hidden = {one.key for one in run.cells if one.equality is not None and one.equality.withheld}
    groups = {tuple(getattr(key, name) for name in GROUP) for key in hidden}
    table["withheld"] = [tuple(row) in groups for row in table[GROUP].itertuples(index=False)]
    table.loc[table["withheld"], [name for name in table if name.startswith(SPEEDS)]] = math.nan
    return table

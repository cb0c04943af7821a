"""Makes tables of a run: a row per cell; and per arm, backend, cache, dataset and load, over the repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

import pandas as pd

from sglang_dflash.bench.records import Cell, Run

GROUP = ["arm", "backend", "radix", "dataset", "load"]
BASELINES = ("off", "builtin")
PERCENTILES = (50, 90, 99)
SPEEDS = ("tok_s", "user_tok_s", "ttft_ms", "tpot_ms", "goodput_rps")
COUNTS = ["compared", "identical", "ties", "different", "unjudged"]
_PLACE = ["radix", "dataset", "load", "repeat"]
_NOT_MEASURED = [*GROUP, "repeat", "failure", "reference", *COUNTS, "judged", "same_engine", "withheld"]


def measure(cell: Cell, limits: Mapping[str, float | None] | None = None) -> dict[str, float]:
    """The measures of one cell; NaN if a number does not exist.

    `tok_s`: output tokens of all requests per second of the cell's wall time. `user_tok_s`: tokens per second of a
    request's own time, including the wait for its first token; median over requests. `goodput_rps`: requests per second
    that keep `limits`, the largest `ttft_ms` and `tpot_ms`. `cached_share`, `draft_cached_share`: share of the prompts'
    tokens whose KV of target and draft was in the prefix cache. The draft's exists only if all requests were answered;
    what is computed again after a retraction lowers it. `accept_1`, `accept_2`, ...: share of verify steps that
    accepted that draft.
    """
    names = ["start_s", "end_s", "tokens", "prompt_tokens", "cached_tokens", "ttft_s", "tpot_s"]
    held = [record for record in cell.records if not record.failure]
    table = pd.DataFrame([[getattr(record, name) for name in names] for record in held], columns=names, dtype=float)
    times = {"ttft_ms": 1e3 * table["ttft_s"], "tpot_ms": 1e3 * table["tpot_s"]}
    own_s = (table["end_s"] - table["start_s"]).where(lambda seconds: seconds > 0)
    wall_s, tokens, prompts = cell.wall_s or math.nan, table["tokens"].sum(), table["prompt_tokens"].sum() or math.nan
    prefilled = cell.prefilled if cell.prefilled is not None and len(held) == len(cell.records) else math.nan
    measures = {
        "requests": float(len(cell.records)),
        "failed": float(len(cell.records) - len(held)),
        "tokens": tokens,
        "tok_s": (tokens or math.nan) / wall_s,
        "user_tok_s": (table["tokens"].where(table["tokens"] > 0) / own_s).median(),
        "prompt_tokens": prompts,
        "cached_share": table["cached_tokens"].sum(min_count=1) / prompts,
        "draft_cached_share": 1 - prefilled / prompts,
        "tau": math.nan,
    }
    for name, column in times.items():
        measures |= {f"{name}_p{share}": column.quantile(share / 100) for share in PERCENTILES}
    if limits:
        kept = times["ttft_ms"].notna()
        for name, limit in limits.items():
            kept &= ~(times[name] > (math.inf if limit is None else limit))
        measures["goodput_rps"] = kept.sum() / wall_s
    if cell.acceptance.steps:
        measures["tau"] = cell.acceptance.tau
        measures |= {f"accept_{i}": share for i, share in enumerate(cell.acceptance.shares, start=1)}
    return measures


def cell_frame(run: Run) -> pd.DataFrame:
    """One row per cell: its key's fields, `failure`, its equality, its measures (NaN if it failed) and its speedups.
    `withheld`: unequal tokens in some repeat make all repeats' speeds NaN."""
    rows = []
    for cell in {cell.key: cell for cell in run.cells}.values():
        judged = cell.equality
        row = {**asdict(cell.key), "failure": cell.failure, "reference": judged.reference if judged else ""}
        row |= {name: getattr(judged, name, 0) for name in COUNTS} | {"judged": judged is not None}
        row |= {name: getattr(judged, name, False) for name in ("same_engine", "withheld")}
        rows.append(row if cell.failure else row | measure(cell, run.options.get("limits")))
    if not rows:
        return pd.DataFrame(columns=_NOT_MEASURED)
    table = pd.DataFrame(rows)
    table["withheld"] = table.groupby(GROUP)["withheld"].transform("any")
    table.loc[table["withheld"], [name for name in table if name.startswith(SPEEDS)]] = math.nan
    for baseline in BASELINES if "tok_s" in table else ():
        table[f"speedup_{baseline}"] = table["tok_s"] / _baseline(table, baseline)
    return table


def _baseline(table: pd.DataFrame, arm: str) -> pd.Series:
    """The baseline's tok/s in the same place. Other engines have no SGLang attention backend: they are compared with
    the baseline if it has only one."""
    rows = table[(table["arm"] == arm) & (table["failure"] == "")]
    same = rows.set_index([*_PLACE, "backend"])["tok_s"]
    only = rows.drop_duplicates(_PLACE, keep=False).set_index(_PLACE)["tok_s"]
    places = pd.MultiIndex.from_frame(table[[*_PLACE, "backend"]])
    other = only.reindex(pd.MultiIndex.from_frame(table[_PLACE])).set_axis(table.index)
    return same.reindex(places).set_axis(table.index).where(places.isin(same.index), other)


def frame(run: Run) -> pd.DataFrame:
    """
    Returns:
        One row per GROUP, in the run's order. Columns besides GROUP: for each measure (see `measure`) `name` (median of
        the repeats), `name_low` and `name_high`; `speedup_off` and `speedup_builtin` likewise (paired by repeat with
        that arm at the same backend, cache, dataset and load); `repeats` (those with a result); `failed_repeats` and
        `failure` (the first failure's sentence, or ""); COUNTS and `reference` (equality, summed over the repeats);
        `same_engine`; `withheld` (tokens of some repeat are unequal: speeds and speedups of the row are NaN). Without
        cells: the columns of GROUP, no rows.
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

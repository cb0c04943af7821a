"""Makes tables of agent sessions by turn: how TTFT grows with the context, and how much the prefix cache saves."""

from __future__ import annotations

import math
from statistics import median

import pandas as pd

from sglang_dflash.bench.frame import GROUP, group_of, withheld_groups
from sglang_dflash.bench.layout import count, escaped, grid, load_words, number
from sglang_dflash.bench.measures import by_turn
from sglang_dflash.bench.records import Run

SPEEDS = ("ttft_ms_p50", "ttft_ms_p90", "tok_s")


def turn_frame(run: Run) -> pd.DataFrame:
    """
    Returns:
        One row per GROUP and `turn` (1 first), in the run's order: the measures of `measures.by_turn`, each the median
        of the repeats, and `withheld`; the SPEEDS of withheld rows are NaN. Failed cells have no rows.
    """
    withheld = withheld_groups(run.cells)
    held: dict[tuple[object, ...], list[dict[str, float]]] = {}
    for cell in run.cells:
        for turn, values in {} if cell.failure else by_turn(cell).items():
            held.setdefault((*group_of(cell.key), turn + 1), []).append(values)
    rows = []
    for key, repeats in held.items():
        hidden = key[:-1] in withheld
        folded = {name: _median([values[name] for values in repeats]) for name in repeats[0]}
        folded |= dict.fromkeys(SPEEDS, math.nan) if hidden else {}
        rows.append({**dict(zip([*GROUP, "turn"], key, strict=True)), **folded, "withheld": hidden})
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=[*GROUP, "turn"])


def turn_tables(run: Run) -> list[str]:
    """Markdown blocks: one table per dataset and load."""
    table = turn_frame(run)
    blocks = []
    for (dataset, load), rows in table.groupby(["dataset", "load"], sort=False):
        backends = len(set(rows["backend"])) > 1
        header = ["method", *["backend"] * backends, "prefix cache", "turn", "prompt tokens", "cached tokens"]
        header += ["TTFT p50 (ms)", "TTFT p90 (ms)", "per request (tok/s)", "tau"]
        lines = [_line(row, backends) for _, row in rows.iterrows()]
        blocks += [f"## {escaped(dataset)} turn by turn, {load_words(run, load)}", grid(header, lines)]
    note = "Medians over the requests of a turn, then over the repeats. tok/s includes the wait for the first token."
    return [*blocks, note] if blocks else []


def _line(row: pd.Series, backends: bool) -> list[str]:
    speeds = ["withheld"] * len(SPEEDS) if row["withheld"] else [number(row[name]) for name in SPEEDS]
    return [
        escaped(row["arm"]),
        *[escaped(row["backend"] or "-")] * backends,
        "on" if row["radix"] else "off",
        str(row["turn"]),
        count(row["prompt_tokens"]),
        count(row["cached_tokens"]),
        *speeds,
        number(row["tau"]),
    ]


def _median(values: list[float]) -> float:
    known = [held for held in values if math.isfinite(held)]
    return median(known) if known else math.nan

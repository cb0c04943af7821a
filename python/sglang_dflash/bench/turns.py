"""Makes the tables of agent sessions by turn: how TTFT grows with the context, and what the prefix cache saves."""

from __future__ import annotations

import pandas as pd

from sglang_dflash.bench.frame import turn_frame
from sglang_dflash.bench.layout import count, escaped, grid, number
from sglang_dflash.bench.records import Run

SPEEDS = ("ttft_ms_p50", "ttft_ms_p90", "tok_s")


def turn_tables(run: Run) -> list[str]:
    """Markdown blocks: one table per dataset and load."""
    table = turn_frame(run)
    blocks = []
    for (dataset, load), rows in table.groupby(["dataset", "load"], sort=False):
        backends = len(set(rows["backend"])) > 1
        header = ["method", *["backend"] * backends, "prefix cache", "turn", "prompt tokens", "cached tokens"]
        header += ["TTFT p50 (ms)", "TTFT p90 (ms)", "per request (tok/s)", "tau"]
        lines = [_line(row, backends) for _, row in rows.iterrows()]
        blocks += [f"## {escaped(dataset)} turn by turn, {run.kind.words(load)}", grid(header, lines)]
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

"""Makes the tables of agent sessions: by turn, how TTFT grows with the context; and what the prefix cache saves."""

from __future__ import annotations

import pandas as pd

from sglang_dflash.bench.frame import turn_frame
from sglang_dflash.bench.layout import count, escaped, grid, number
from sglang_dflash.bench.records import Run

SPEEDS = ("ttft_ms_p50", "ttft_ms_p90", "tok_s")


def turn_tables(run: Run, cells: pd.DataFrame) -> list[str]:
    """Markdown blocks: two tables per dataset and load.

    Args:
        cells: `frame(run)`.
    """
    table = turn_frame(run)
    blocks = []
    for (dataset, load), rows in table.groupby(["dataset", "load"], sort=False):
        backends = len(set(rows["backend"])) > 1
        header = ["method", *["backend"] * backends, "prefix cache", "turn", "prompt tokens", "cached (%)"]
        header += ["TTFT p50 (ms)", "TTFT p90 (ms)", "per request (tok/s)", "tau"]
        lines = [_line(row, backends) for _, row in rows.iterrows()]
        blocks += [f"## {escaped(dataset)} turn by turn, {run.kind.words(load)}", grid(header, lines)]
        called = bool(run.options.get("tool_call_parser"))
        blocks += _savings(cells[(cells["dataset"] == dataset) & (cells["load"] == load)], backends, called)
    note = (
        "By turn, prompt tokens, TTFT and tok/s are medians over the requests; cached and tau are of all of them. Then "
        "medians over the repeats. tok/s includes the wait for the first token."
    )
    return [*blocks, note] if blocks else []


def _savings(rows: pd.DataFrame, backends: bool, called: bool) -> list[str]:
    """What all turns together found in the prefix cache, and the tool calls."""
    header = ["method", *["backend"] * backends, "prefix cache", "prompt tokens", "cached (%)", "cached in draft (%)"]
    header += ["tau", *["tool calls"] * called]
    lines = [
        [
            *_place(row, backends),
            count(row["prompt_tokens"]),
            number(100 * row["cached_share"]),
            number(100 * row["draft_cached_share"]),
            number(row["tau"]),
            *[count(row["tool_calls"])] * called,
        ]
        for _, row in rows[rows["repeats"] > 0].iterrows()
    ]
    return ["All turns:", grid(header, lines)]


def _place(row: pd.Series, backends: bool) -> list[str]:
    return [escaped(row["arm"]), *[escaped(row["backend"] or "-")] * backends, "on" if row["radix"] else "off"]


def _line(row: pd.Series, backends: bool) -> list[str]:
    speeds = ["withheld"] * len(SPEEDS) if row["withheld"] else [number(row[name]) for name in SPEEDS]
    return [
        *_place(row, backends),
        str(row["turn"]),
        count(row["prompt_tokens"]),
        number(100 * row["cached_share"]),
        *speeds,
        number(row["tau"]),
    ]

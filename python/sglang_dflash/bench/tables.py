"""Writes a run as text: the Markdown report, CSV, and a compact table for the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_dflash.bench import details
from sglang_dflash.bench.frame import GROUP
from sglang_dflash.bench.layout import (
    Section,
    count,
    escaped,
    grid,
    identical_share,
    must_agree,
    number,
    sections,
    spread,
    value,
)
from sglang_dflash.bench.records import Run
from sglang_dflash.bench.turns import turn_tables

_EXAMPLES = 2


def markdown(run: Run, table: pd.DataFrame) -> str:
    """The Markdown report.

    Args:
        table: `frame(run)`.
    """
    blocks = [f"# Benchmark: {run.kind.title}", _command(run), *_setting(run)]
    for section in sections(table):
        blocks += [f"## {escaped(section.title)}", *_main(run, section), *details.blocks(run, section)]
    if run.kind.agent:
        blocks += turn_tables(run, table)
    if table.empty:
        blocks.append("Nothing was measured.")
    return "\n\n".join(block for block in blocks if block) + "\n"


def csv(table: pd.DataFrame) -> str:
    """All columns of the table; a missing or withheld value is empty."""
    return table.to_csv(index=False, float_format="%.10g", lineterminator="\n")


def console(run: Run, table: pd.DataFrame) -> RenderableType:
    """Only medians and speedups, for a terminal."""
    shown: list[RenderableType] = []
    for section in sections(table):
        grid_ = Table(title=Text(section.title), title_justify="left", header_style="bold")
        grid_.add_column("method")
        for load in section.loads():
            grid_.add_column(f"{run.kind.words(load)}\ntok/s", justify="right")
        identical = not must_agree(section.rows)
        for name in ["identical"] * identical + ["average\ntau"]:
            grid_.add_column(name, justify="right")
        for arm in section.arms():
            cells = [_cell(section.row(arm, load), ranges=False) for load in section.loads()]
            cells += [_identical(section, arm)] * identical + [number(_average_tau(section, arm))]
            grid_.add_row(Text(arm), *(Text(cell) for cell in cells))
        shown += [grid_, *(Text(f"  {sentence}") for sentence in _below(run, section))]
    return Group(*shown) if shown else Text("Nothing was measured.")


def _command(run: Run) -> str:
    longest = max((len(ticks) for ticks in re.findall("`+", run.command)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{run.command}\n{fence}"


def _setting(run: Run) -> list[str]:
    facts = []
    for title, held in (("Machine", run.machine), ("Versions", run.versions)):
        if held:
            known = {name: fact for name, fact in held.items() if fact not in (None, "", [])}
            words = (f"{escaped(name)} {escaped(_flat(fact))}" for name, fact in known.items())
            facts.append(f"{title}: {', '.join(words)}.")
    return [*facts, "\n".join(f"* {escaped(note)}" for note in run.notes)]


def _flat(fact: object) -> str:
    return " + ".join(map(str, fact)) if isinstance(fact, list) else str(fact)


def _main(run: Run, section: Section) -> list[str]:
    identical = not must_agree(section.rows)
    header = ["method", *(f"{run.kind.words(load)} (tok/s)" for load in section.loads())]
    header += ["identical"] * identical + ["average tau"]
    rows = []
    for arm in section.arms():
        cells = [_cell(section.row(arm, load)) for load in section.loads()]
        cells += [_identical(section, arm)] * identical + [number(_average_tau(section, arm))]
        rows.append([escaped(arm), *cells])
    below = "\n".join(f"* {escaped(sentence)}" for sentence in _below(run, section))
    return [_legend(section, identical), grid(header, rows), below]


def _legend(section: Section, identical: bool) -> str:
    repeats = int(max(section.rows["repeats"]))
    spread_words = f", median of {repeats} repeats (lowest-highest)" if repeats > 1 else ""
    paired = " (median of the ratios per repeat)" if repeats > 1 else ""
    ratio = f", then the speedup over `off`{paired}" if "off" in section.arms() else ""
    share = " identical: share of requests with the tokens of the arm they are compared with." if identical else ""
    return (
        f"Output tok/s of all requests together{spread_words}{ratio}; higher is better. tau: tokens per verify step."
        + share
    )


def _cell(row: Mapping[str, Any] | None, ranges: bool = True) -> str:
    if row is None:
        return "-"
    if row["withheld"]:
        return f"withheld: {row['different']} of {row['compared']} requests differ"
    if not row["repeats"]:
        return "failed"
    speed = spread(row, "tok_s") if ranges else number(value(row, "tok_s"))
    ratio = value(row, "speedup_off")
    if row["arm"] != "off" and math.isfinite(ratio):
        speed += f", {number(ratio)}x" if ranges else f" {number(ratio)}x"
    return speed + (f"; {row['failed_repeats']} failed" if row["failed_repeats"] else "")


def _identical(section: Section, arm: str) -> str:
    rows = section.rows[section.rows["arm"] == arm]
    share = identical_share(rows)
    return "-" if math.isnan(share) else f"{share:.1%} of {rows['compared'].sum()}"


def _average_tau(section: Section, arm: str) -> float:
    held = [value(section.row(arm, load), "tau") for load in section.loads()]
    known = [tau for tau in held if math.isfinite(tau)]
    return sum(known) / len(known) if known else math.nan


def _below(run: Run, section: Section) -> list[str]:
    """Sentences below the table: failures, and requests whose tokens differ."""
    said = []
    for _, row in section.rows.iterrows():
        where = f"{row['arm']}, {run.kind.words(row['load'])}"
        if row["failure"]:
            of = f" ({row['failed_repeats']} of {row['repeats'] + row['failed_repeats']} repeats)"
            said.append(f"{where}: failed{of if row['repeats'] else ''}: {row['failure']}")
        if value(row, "failed_high") > 0:
            said.append(f"{where}: up to {count(value(row, 'failed_high'))} requests failed in a repeat.")
        if row["withheld"]:
            said.append(
                f"{where}: speeds are withheld: {row['different']} of {row['compared']} requests differ from "
                f"{row['reference']}."
            )
            said += [f"{where}: {example}" for example in _examples(run, row)]
        if row["same_engine"] and row["ties"]:
            said.append(
                f"{where}: {row['ties']} of {row['compared']} requests differ from {row['reference']} at a tie: the "
                "target's logits of both tokens are equal up to rounding."
            )
        if row["same_engine"] and row["unjudged"]:
            said.append(f"{where}: {row['unjudged']} requests were not compared, because an earlier turn differs.")
    return said


def _examples(run: Run, row: pd.Series) -> list[str]:
    cells = [cell for cell in run.cells if cell.equality is not None and cell.equality.withheld]
    of_row = [cell for cell in cells if all(getattr(cell.key, name) == row[name] for name in GROUP)]
    return [example for cell in of_row for example in cell.equality.examples][:_EXAMPLES]

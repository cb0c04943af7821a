"""Writes a run as text: the Markdown report, and a compact table for the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglang_dflash.bench.frame import BASELINES, GROUP, PERCENTILES
from sglang_dflash.bench.records import Run


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one dataset that can be compared: one backend, one cache setting.

    Fields:
        title: the dataset; also the backend if the run has several, and the cache if it is off.
        rows: rows of the run's table, in its order.
    """

    title: str
    dataset: str
    backend: str
    radix: bool
    rows: pd.DataFrame

    def arms(self) -> list[str]:
        return list(dict.fromkeys(self.rows["arm"]))

    def loads(self) -> list[float]:
        return sorted(set(self.rows["load"]))

    def row(self, arm: str, load: float) -> dict[str, Any] | None:
        """None if it was not run."""
        found = self.rows[(self.rows["arm"] == arm) & (self.rows["load"] == load)]
        return None if found.empty else found.iloc[0].to_dict()


def sections(table: pd.DataFrame) -> list[Section]:
    """One per dataset, backend and cache setting, in the run's order.

    If only one backend is named, rows without a backend (other engines) join it, unless an arm has both kinds of rows.
    """
    backends = table["backend"]
    named, bare = [name for name in dict.fromkeys(backends) if name], set(table.loc[backends == "", "arm"])
    if len(named) == 1 and not bare & set(table.loc[backends != "", "arm"]):
        backends = backends.replace("", named[0])
    found = []
    for (dataset, radix, backend), rows in table.groupby(["dataset", "radix", backends], sort=False):
        several = [f"attention backend {backend or 'of the server'}"] * (len(set(backends)) > 1)
        title = ", ".join([str(dataset), *several, *["prefix cache off"] * (not radix)])
        found.append(Section(title, str(dataset), str(backend), bool(radix), rows))
    return sorted(found, key=lambda section: list(dict.fromkeys(table["dataset"])).index(section.dataset))


def value(row: Mapping[str, Any] | None, name: str) -> float:
    """NaN if the row or the column is missing."""
    held = math.nan if row is None else row.get(name, math.nan)
    return math.nan if held is None else float(held)


def number(held: float) -> str:
    """Three significant digits, with commas between thousands; `-` if the number does not exist."""
    if not math.isfinite(held):
        return "-"
    rounded = float(f"{held:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded)))) if rounded else 0
    return f"{rounded:,.{decimals}f}"


def identical(rows: pd.DataFrame) -> float:
    """Share of the compared requests that got the reference arm's tokens; NaN if none was compared."""
    compared = int(rows["compared"].sum())
    return int(rows["identical"].sum()) / compared if compared else math.nan


def may_differ(rows: pd.DataFrame) -> bool:
    """Whether some of `rows` need not have the reference arm's tokens; then their share is shown."""
    return bool(((rows["compared"] > 0) & ~rows["same_engine"].astype(bool)).any())


def markdown(run: Run, table: pd.DataFrame) -> str:
    """The Markdown report of `frame(run)`."""
    fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", run.command))])
    blocks = [f"# Benchmark: {run.kind.title}", f"{fence}sh\n{run.command}\n{fence}"]
    for title, held in (("Machine", run.machine), ("Versions", run.versions)):
        facts = {name: " + ".join(fact) if isinstance(fact, list) else fact for name, fact in held.items()}
        known = [f"{name} {fact}" for name, fact in facts.items() if fact not in (None, "")]
        blocks += [f"{title}: {', '.join(map(_escaped, known))}."] * bool(known)
    blocks.append("\n".join(f"* {_escaped(note)}" for note in run.notes))
    for section in sections(table):
        below = "\n".join(f"* {_escaped(sentence)}" for sentence in _below(run, section))
        blocks += [f"## {_escaped(section.title)}", _legend(section), _grid(*_main(run, section, True)), below]
        blocks += [*_latency(run, section), *_acceptance(section)]
    blocks += ["Nothing was measured."] * table.empty
    return "\n\n".join(filter(None, blocks)) + "\n"


def console(run: Run, table: pd.DataFrame) -> RenderableType:
    """Only medians and speedups, for a terminal."""
    shown: list[RenderableType] = []
    for section in sections(table):
        header, rows = _main(run, section, False)
        grid = Table(title=Text(section.title), title_justify="left", header_style="bold")
        for place, name in enumerate(header):
            grid.add_column(name.replace(" (", "\n("), justify="right" if place else "left")
        for row in rows:
            grid.add_row(*map(Text, row))
        shown += [grid, *(Text(f"  {sentence}") for sentence in _below(run, section))]
    return Group(*shown) if shown else Text("Nothing was measured.")


def _escaped(text: object) -> str:
    """The text on one line, with Markdown's special characters escaped."""
    return re.sub(r"([\\|<*`])", r"\\\1", " ".join(str(text).split()))


def _grid(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _spread(row: Mapping[str, Any], name: str, unit: str = "") -> str:
    """The median; with several repeats, also the lowest and the highest in brackets."""
    if row["withheld"] and name != "tau":
        return "withheld"
    middle, low, high = (value(row, f"{name}{end}") for end in ("", "_low", "_high"))
    ranges = row["repeats"] > 1 and math.isfinite(low)
    span = f" ({number(low)}-{number(high)})" if ranges else ""
    return f"{number(middle)}{unit}{span}" if math.isfinite(middle) else "-"


def _legend(section: Section) -> str:
    repeats = int(max(section.rows["repeats"]))
    ranges = f", median of {repeats} repeats (lowest-highest)" * (repeats > 1)
    ratio = ", then the speedup over `off`" + " (median of the ratios per repeat)" * (repeats > 1)
    share = " identical: share of requests with the tokens of the arm they are compared with."
    said = f"Output tok/s of all requests together{ranges}{ratio * ('off' in section.arms())}; higher is better."
    return f"{said} tau: tokens per verify step.{share * may_differ(section.rows)}"


def _main(run: Run, section: Section, ranges: bool) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a section's first table."""
    shares, rows = may_differ(section.rows), []
    for arm in section.arms():
        own = section.rows[section.rows["arm"] == arm]
        tau = own["tau"].mean() if "tau" in own else math.nan
        share = f"{identical(own):.1%} of {own['compared'].sum()}" if own["compared"].any() else "-"
        speeds = [_speed(section.row(arm, load), ranges) for load in section.loads()]
        rows.append([arm, *speeds, *[share] * shares, number(tau)])
    loads = [f"{run.kind.words(load)} (tok/s)" for load in section.loads()]
    return ["method", *loads, *["identical"] * shares, "average tau"], rows


def _speed(row: Mapping[str, Any] | None, ranges: bool) -> str:
    if row is None:
        return "-"
    if row["withheld"]:
        return f"withheld: {row['different']} of {row['compared']} requests differ"
    if not row["repeats"]:
        return "failed"
    speed = _spread(row, "tok_s") if ranges else number(value(row, "tok_s"))
    ratio = value(row, "speedup_off")
    if row["arm"] != "off" and math.isfinite(ratio):
        speed += f"{',' * ranges} {number(ratio)}x"
    return speed + (f"; {row['failed_repeats']} failed" if row["failed_repeats"] else "")


def _below(run: Run, section: Section) -> list[str]:
    """Sentences below the table: failures, and requests whose tokens differ."""
    said = []
    for _, row in section.rows.iterrows():
        notes = []
        differ = f"of {row['compared']} requests differ from {row['reference']}"
        if row["failure"]:
            of = f" ({row['failed_repeats']} of {row['repeats'] + row['failed_repeats']} repeats)"
            notes.append(f"failed{of if row['repeats'] else ''}: {row['failure']}")
        if value(row, "failed_high") > 0:
            notes.append(f"up to {value(row, 'failed_high'):,.0f} requests failed in a repeat.")
        if row["withheld"]:
            cells = [cell for cell in run.cells if all(getattr(cell.key, name) == row[name] for name in GROUP)]
            examples = [example for cell in cells if cell.equality for example in cell.equality.examples]
            notes += [f"speeds are withheld: {row['different']} {differ}.", *examples[:2]]
        if row["same_engine"] and row["ties"]:
            notes.append(f"{row['ties']} {differ} at a tie: both tokens' logits are equal up to rounding.")
        if row["same_engine"] and row["unjudged"]:
            notes.append(f"{row['unjudged']} requests were not compared, because an earlier turn differs.")
        said += [f"{row['arm']}, {run.kind.words(row['load'])}: {note}" for note in notes]
    return said


def _latency(run: Run, section: Section) -> list[str]:
    """Latencies, with `--ttft-limit-ms` or `--tpot-limit-ms` goodput, in agent sessions what was cached."""
    limits = {name[:4].upper(): limit for name, limit in (run.options.get("limits") or {}).items() if limit}
    times = [(kind, share) for kind in ("TTFT", "TPOT") for share in PERCENTILES]
    speeds = {f"{kind} p{share} (ms)": f"{kind.lower()}_ms_p{share}" for kind, share in times}
    speeds |= {"per user (tok/s)": "user_tok_s"} | ({"goodput (requests/s)": "goodput_rps"} if limits else {})
    baselines = [arm for arm in BASELINES if arm in section.arms()]
    cached = {"cached (%)": "cached_share", "cached in draft (%)": "draft_cached_share"}
    cached = cached if run.workload == "agent" else {}
    header = ["method", "load", *speeds, *(f"over {arm}" for arm in baselines), "tau", "failed / requests", *cached]
    rows = []
    for arm, load in [(arm, load) for arm in section.arms() for load in section.loads()]:
        row = section.row(arm, load)
        if row is not None and row["repeats"]:
            ratios = ["-" if arm == base else _spread(row, f"speedup_{base}", "x") for base in baselines]
            cells = [*(_spread(row, name) for name in speeds.values()), *ratios, _spread(row, "tau")]
            failed = f"{value(row, 'failed'):,.0f} / {value(row, 'requests'):,.0f}"
            shares = [number(100 * value(row, name)) for name in cached.values()]
            rows.append([arm, run.kind.words(load), *cells, failed, *shares])
    kept = " and ".join(f"{name} <= {limit:g} ms" for name, limit in limits.items())
    note = "TTFT: time to the first token. TPOT: time per token after the first."
    note += f" Goodput: requests that meet {kept}." if limits else ""
    return ["### Latency and acceptance", note, _grid(header, rows)] if rows else []


def _acceptance(section: Section) -> list[str]:
    names = [name for name in section.rows if re.fullmatch(r"accept_\d+", name)]
    names.sort(key=lambda name: int(name.removeprefix("accept_")))
    shares = section.rows.groupby("arm", sort=False)[names].mean().dropna(how="all").dropna(axis=1, how="all")
    if shares.empty:
        return []
    header = ["method", *(f"{i} (%)" for i in range(1, shares.shape[1] + 1))]
    rows = [[str(arm), *(number(100 * share) for share in row)] for arm, row in shares.iterrows()]
    note = "Share of all verify steps, including narrower ones, that accepted draft 1, 2, ...; mean over the loads."
    return ["### Acceptance by position", note, _grid(header, rows)]

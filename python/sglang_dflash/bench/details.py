"""Makes the tables below a section's main table: goodput, latencies, tau, acceptance by position."""

from __future__ import annotations

import math
import re
from typing import Any

from sglang_dflash.bench.frame import BASELINES
from sglang_dflash.bench.layout import Section, count, escaped, grid, limit_words, number, spread, value
from sglang_dflash.bench.measures import PERCENTILES
from sglang_dflash.bench.records import Run


def blocks(run: Run, section: Section) -> list[str]:
    """Tables with their headings; tables without data are left out."""
    return [*_goodput(run, section), *_details(run, section), *_acceptance(section)]


def _goodput(run: Run, section: Section) -> list[str]:
    if "goodput_rps" not in section.rows or not run.options.get("limits"):
        return []
    header = ["method", *(f"{run.kind.words(load)} (good requests/s)" for load in section.loads())]
    rows = []
    for arm in section.arms():
        cells = [section.row(arm, load) for load in section.loads()]
        rows.append([escaped(arm), *("withheld" if c and c["withheld"] else spread(c, "goodput_rps") for c in cells)])
    return [f"### Goodput: requests that meet {limit_words(run)}", grid(header, rows)]


def _details(run: Run, section: Section) -> list[str]:
    header = ["method", "load"]
    header += [f"{name} p{share} (ms)" for name in ("TTFT", "TPOT") for share in PERCENTILES]
    baselines = [arm for arm in BASELINES if arm in section.arms()]
    header += ["per user (tok/s)", *(f"over {arm}" for arm in baselines)]
    header += ["tau", "failed / requests"]
    rows = []
    for arm in section.arms():
        for load in section.loads():
            row = section.row(arm, load)
            if row is not None and row["repeats"]:
                rows.append([escaped(arm), run.kind.words(load), *_speeds(row, baselines), *_steps(row)])
    note = "TTFT: time to the first token. TPOT: time per token after the first."
    return ["### Latency and acceptance", note, grid(header, rows)] if rows else []


def _speeds(row: dict[str, Any], baselines: list[str]) -> list[str]:
    names = [f"{kind}_ms_p{share}" for kind in ("ttft", "tpot") for share in PERCENTILES]
    ratios = ["-" if row["arm"] == base else spread(row, f"speedup_{base}", "x") for base in baselines]
    cells = [*(spread(row, name) for name in [*names, "user_tok_s"]), *ratios]
    return ["withheld"] * len(cells) if row["withheld"] else cells


def _steps(row: dict[str, Any]) -> list[str]:
    failed = f"{count(value(row, 'failed'))} / {count(value(row, 'requests'))}"
    return [spread(row, "tau"), failed]


def positions(section: Section, arm: str) -> list[float]:
    """Percent of the verify steps that accepted draft 1, 2, ...; mean over loads, NaN if no load has a value."""
    names = [name for name in section.rows if re.fullmatch(r"accept_\d+", name)]
    rows = section.rows[section.rows["arm"] == arm]
    shares = [100 * float(rows[name].mean()) for name in sorted(names, key=lambda name: int(name.split("_")[1]))]
    while shares and math.isnan(shares[-1]):
        shares.pop()
    return shares


def _acceptance(section: Section) -> list[str]:
    held = {arm: shares for arm in section.arms() if (shares := positions(section, arm))}
    if not held:
        return []
    longest = max(len(shares) for shares in held.values())
    header = ["method", *(f"{i} (%)" for i in range(1, longest + 1))]
    rows = [
        [escaped(arm), *(number(share) for share in shares), *["-"] * (longest - len(shares))]
        for arm, shares in held.items()
    ]
    note = "Share of all verify steps, including narrower ones, that accepted draft 1, 2, ...; mean over the loads."
    return ["### Acceptance by position", note, grid(header, rows)]

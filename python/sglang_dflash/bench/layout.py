"""Shared by tables and plots: divides a run into sections and formats loads and numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

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
    backends = _backends(table)
    several = len(set(backends)) > 1
    found = []
    for (dataset, radix, backend), rows in table.groupby(["dataset", "radix", backends], sort=False):
        words = [str(dataset)]
        if several:
            words.append(f"attention backend {backend or 'of the server'}")
        if not radix:
            words.append("prefix cache off")
        found.append(Section(", ".join(words), str(dataset), str(backend), bool(radix), rows))
    return sorted(found, key=lambda section: list(dict.fromkeys(table["dataset"])).index(section.dataset))


def _backends(table: pd.DataFrame) -> pd.Series:
    named = [backend for backend in dict.fromkeys(table["backend"]) if backend]
    unnamed = set(table.loc[table["backend"] == "", "arm"])
    if len(named) == 1 and not unnamed & set(table.loc[table["backend"] != "", "arm"]):
        return table["backend"].replace("", named[0])
    return table["backend"]


def value(row: Mapping[str, Any] | None, name: str) -> float:
    """NaN if the row or the column is missing."""
    held = math.nan if row is None else row.get(name, math.nan)
    return math.nan if held is None else float(held)


def number(held: float) -> str:
    """Three significant digits, with commas between thousands; `-` if the number does not exist."""
    if not math.isfinite(held):
        return "-"
    if held == 0:
        return "0"
    rounded = float(f"{held:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def identical_share(rows: pd.DataFrame) -> float:
    """Share of the compared requests in `rows` that got the reference arm's tokens; NaN if none was compared."""
    compared = int(rows["compared"].sum())
    return int(rows["identical"].sum()) / compared if compared else math.nan


def must_agree(rows: pd.DataFrame) -> bool:
    """Whether all of `rows` must have the reference arm's tokens; then speeds need no share of identical requests."""
    return not ((rows["compared"] > 0) & ~rows["same_engine"].astype(bool)).any()


def count(held: float) -> str:
    return f"{held:,.0f}" if math.isfinite(held) else "-"


def spread(row: Mapping[str, Any] | None, name: str, unit: str = "") -> str:
    """The median; with several repeats, also the lowest and the highest in brackets."""
    middle = value(row, name)
    if row is None or not math.isfinite(middle):
        return "-"
    low, high = value(row, f"{name}_low"), value(row, f"{name}_high")
    span = f" ({number(low)}-{number(high)})" if row["repeats"] > 1 and math.isfinite(low) else ""
    return f"{number(middle)}{unit}{span}"


def escaped(text: object) -> str:
    """The text on one line, with Markdown's special characters escaped."""
    return re.sub(r"([\\|<*`])", r"\\\1", " ".join(str(text).split()))


def limit_words(run: Run) -> str:
    """The limits that a good request meets."""
    limits = run.options.get("limits") or {}
    words = [f"{name.upper()} <= {limits[f'{name}_ms']:g} ms" for name in ("ttft", "tpot") if limits.get(f"{name}_ms")]
    return " and ".join(words) or "no limit"


def grid(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])

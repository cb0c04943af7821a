"""Plots a run: the speedup over speculation off, and total against per-user speed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_dflash.bench.records import Run
from sglang_dflash.bench.tables import identical, may_differ, sections
from sglang_dflash.serving.arms import ARMS

_OFF = "#8c8c8c"
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))  # the marker also shows single points
Lines = dict[str, list[tuple[dict[str, Any], pd.DataFrame]]]  # by dataset: a style, and points of load and measures


def draw(run: Run, table: pd.DataFrame, folder: Path, stem: str) -> list[Path]:
    """Writes each plot of `frame(run)` that has data as `stem-name.png` and `.svg`; returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (("speedup", _speedup(run, table)), ("pareto", _pareto(run, table))):
        for suffix in ("png", "svg") if figure is not None else ():
            written.append(folder / f"{stem}-{name}.{suffix}")
            figure.savefig(written[-1], dpi=150, facecolor="white")
    return written


def _lines(table: pd.DataFrame, *names: str) -> Lines:
    """The rows that have all measures. The colour shows the arm, the dashes show backend and cache; a label tells the
    share of identical requests of an arm whose tokens may differ."""
    arms = list(dict.fromkeys((*ARMS, *table["arm"])))
    variants: dict[tuple[str, bool], int] = {}
    found: Lines = {}
    for section in sections(table):
        dash, marker = _STYLES[variants.setdefault((section.backend, section.radix), len(variants)) % len(_STYLES)]
        for arm in section.arms():
            own, rows = table[table["arm"] == arm], section.rows[section.rows["arm"] == arm]
            points = rows.sort_values("load").reindex(columns=["load", *names]).dropna()
            share = f" ({identical(own):.0%} identical)" if may_differ(own) else ""
            label = f"{arm}{share}{section.title.removeprefix(section.dataset)}"
            colour = _OFF if arm == "off" else colormaps["tab20"](arms.index(arm) % 20)
            if len(points):
                style = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4, "label": label}
                found.setdefault(section.dataset, []).append((style, points))
    return found


def _speedup(run: Run, table: pd.DataFrame) -> Figure | None:
    """Over the load, with the range of the repeats as error bars; None without data."""
    lines = _lines(table[table["arm"] != "off"], "speedup_off", "speedup_off_low", "speedup_off_high")
    title = "Speedup of output tok/s over off (higher is better; bars: lowest and highest repeat)"
    figure, axes = _panels(list(lines), title, "times the speed of off")
    for axis, held in zip(axes, lines.values(), strict=True):
        for style, points in held:
            loads, middle, low, high = (points[name] for name in points)
            axis.errorbar(loads, middle, yerr=[middle - low, high - middle], capsize=3, **style)
        loads = sorted({load for _, points in held for load in points["load"]})
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads, [f"{load:g}" for load in loads])
        axis.set_xticks([], minor=True)
        axis.set_xlabel(run.kind.unit)
        axis.axhline(1.0, color=_OFF, linewidth=1.5, label="off", zorder=1)
    return _finished(figure, axes)


def _pareto(run: Run, table: pd.DataFrame) -> Figure | None:
    lines = _lines(table, "user_tok_s", "tok_s")
    title = f"Total against per-user speed (up and right is better; numbers: {run.kind.unit})"
    figure, axes = _panels(list(lines), title, "all users (tok/s)")
    for axis, held in zip(axes, lines.values(), strict=True):
        for style, points in held:
            axis.plot(points["user_tok_s"], points["tok_s"], **style)
            for load, user, total in points.itertuples(index=False):
                axis.annotate(f"{load:g}", (user, total), (4, 4), textcoords="offset points", fontsize=8)
        axis.set_xlabel("per user (tok/s)")
        axis.set_xlim(0, 1.1 * axis.dataLim.xmax)
    return _finished(figure, axes)


def _panels(titles: list[str], title: str, label: str) -> tuple[Figure, list[Axes]]:
    """One small panel per title; all panels share the y axis."""
    columns = min(3, len(titles)) or 1
    rows = math.ceil(len(titles) / columns) or 1
    figure = Figure(figsize=(9.0, 0.9 + 2.7 * rows), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axis in axes[len(titles) :]:
        axis.remove()
    for place, (axis, text) in enumerate(zip(axes, titles, strict=False)):
        axis.set_title(text, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.set_ylabel("" if place % columns else label)
    return figure, axes[: len(titles)]


def _finished(figure: Figure, axes: list[Axes]) -> Figure | None:
    """Makes the y axis begin at zero, and adds one legend below all panels; None without panels."""
    if not axes:
        return None
    axes[0].set_ylim(0, 1.07 * max(axis.dataLim.ymax for axis in axes))
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, min(len(handles), 90 // (max(map(len, handles)) + 6)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
    return figure

"""Plots a run: the speedup over speculation off, and total against per-user speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_dflash.bench.layout import Section, identical_share, must_agree, sections, value
from sglang_dflash.bench.records import Run

COLOURS = {
    "off": "#8c8c8c",
    "dflash": "#d1123f",
    "dflash-full": "#e8879c",
    "builtin": "#1f6fb4",
    "eagle3": "#2f9e5b",
    "standalone": "#8a5fbf",
    "ngram": "#b8860b",
    "transformers": "#5f4b3c",
    "vllm": "#e07b1a",
    "vllm-off": "#c9b79c",
}
_SPARE = ("#0b7a75", "#c2559d", "#5a6acf", "#6b8e23")
_DASHES = {"-": "o", "--": "s", ":": "^", "-.": "D"}  # dash -> marker, which also shows single points
_COLUMNS = 3
_WIDTH_IN = 9.0
_DPI = 150


@dataclass(frozen=True, slots=True)
class Line:
    """One arm in one section, with its drawing style."""

    arm: str
    section: Section
    label: str
    colour: str
    dash: str

    @property
    def marker(self) -> str:
        return _DASHES[self.dash]

    def points(self, *names: str) -> list[tuple[float, ...]]:
        """(load, *measures) of the rows that have all named measures; a failed row has none."""
        rows = [(load, self.section.row(self.arm, load)) for load in self.section.loads()]
        held = [(load, *(value(row, name) for name in names)) for load, row in rows]
        return [point for point in held if all(math.isfinite(number) for number in point)]


def draw(run: Run, table: pd.DataFrame, folder: Path, stem: str) -> list[Path]:
    """Writes each plot that has data as `stem-name.png` and `.svg`.

    Args:
        table: `frame(run)`.

    Returns:
        The files written; a plot without data is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    panels = _panels(table)
    figures = {"speedup": _speedup(run, panels), "pareto": _pareto(run, panels)}
    written = []
    for name, figure in figures.items():
        for suffix in ("png", "svg") if figure is not None else ():
            written.append(folder / f"{stem}-{name}.{suffix}")
            figure.savefig(written[-1], dpi=_DPI, facecolor="white")
    return written


def _panels(table: pd.DataFrame) -> dict[str, list[Line]]:
    """The lines of each dataset: the colour shows the arm, the dashes show backend and cache."""
    spare = cycle(_SPARE)
    colours = {arm: COLOURS.get(arm) or next(spare) for arm in dict.fromkeys(table["arm"])}
    shares = {arm: _share(table[table["arm"] == arm]) for arm in colours}
    panels: dict[str, list[Line]] = {}
    variants: dict[tuple[str, bool], str] = {}
    for section in sections(table):
        variant = (section.backend, section.radix)
        dash = variants.setdefault(variant, list(_DASHES)[len(variants) % len(_DASHES)])
        beyond = section.title.removeprefix(section.dataset)
        for arm in section.arms():
            line = Line(arm, section, f"{arm}{shares[arm]}{beyond}", colours[arm], dash)
            panels.setdefault(section.dataset, []).append(line)
    return panels


def _share(rows: pd.DataFrame) -> str:
    """Label suffix of an arm whose tokens may differ: the share of identical requests."""
    return "" if must_agree(rows) else f" ({identical_share(rows):.0%} identical)"


def _with_points(panels: dict[str, list[Line]], points: Callable[[Line], list[Any]]) -> dict[str, list[Any]]:
    """By dataset, the lines that have points, each with its points."""
    found = {dataset: [(line, held) for line in lines if (held := points(line))] for dataset, lines in panels.items()}
    return {dataset: lines for dataset, lines in found.items() if lines}


def _speedup(run: Run, panels: dict[str, list[Line]]) -> Figure | None:
    """Over the load, with the range of the repeats as error bars; None without data."""
    names = ("speedup_off", "speedup_off_low", "speedup_off_high")
    drawn = _with_points(panels, lambda line: line.points(*names) if line.arm != "off" else [])
    if not drawn:
        return None
    title = "Speedup of output tok/s over off (higher is better; bars: lowest and highest repeat)"
    figure, axes = _grid(list(drawn), title)
    for axis, lines in zip(axes, drawn.values(), strict=True):
        for line, points in lines:
            loads, middles, lows, highs = map(list, zip(*points, strict=True))
            below = [m - low for m, low in zip(middles, lows, strict=True)]
            above = [high - m for m, high in zip(middles, highs, strict=True)]
            style = {"color": line.colour, "linestyle": line.dash, "label": line.label}
            axis.errorbar(loads, middles, yerr=[below, above], marker=line.marker, markersize=4, capsize=3, **style)
        _load_axis(axis, sorted({point[0] for _, points in lines for point in points}), run)
    _from_zero(axes)
    _label_left(axes, "times the speed of off")
    for axis in axes:
        axis.axhline(1.0, color=COLOURS["off"], linewidth=1.5, label="off", zorder=1)
    return _with_legend(figure, axes)


def _pareto(run: Run, panels: dict[str, list[Line]]) -> Figure | None:
    drawn = _with_points(panels, lambda line: line.points("user_tok_s", "tok_s"))
    if not drawn:
        return None
    figure, axes = _grid(
        list(drawn), f"Total against per-user speed (up and right is better; numbers: {run.kind.unit})"
    )
    for axis, lines in zip(axes, drawn.values(), strict=True):
        for line, points in lines:
            users, totals = [point[1] for point in points], [point[2] for point in points]
            marks = {"marker": line.marker, "markersize": 7, "markerfacecolor": "white"}
            axis.plot(users, totals, line.dash, color=line.colour, label=line.label, **marks)
            for point in points:
                _numbered(axis, line, *point)
        axis.set_xlabel("per user (tok/s)")
        axis.set_xlim(0, 1.1 * max(point[1] for _, points in lines for point in points))
    _from_zero(axes)
    _label_left(axes, "all users (tok/s)")
    return _with_legend(figure, axes)


def _numbered(axis: Axes, line: Line, load: float, x: float, y: float) -> None:
    """Draws a point with its load inside it. Outside, the numbers of close lines would cover each other."""
    over = len(axis.texts) / 1000 + 3  # a later point hides an earlier one together with its number
    axis.plot([x], [y], line.marker, markersize=12, markerfacecolor="white", color=line.colour, zorder=over)
    size = {1: 8, 2: 7}.get(len(f"{load:g}"), 5.5)
    centred = {"ha": "center", "va": "center_baseline"}
    axis.text(x, y, f"{load:g}", color=line.colour, fontsize=size, zorder=over, **centred)


def _grid(titles: list[str], title: str) -> tuple[Figure, list[Axes]]:
    """One small panel per title; all panels share the y axis."""
    columns = min(_COLUMNS, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(_WIDTH_IN, 0.9 + 2.7 * rows), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axis in axes[len(titles) :]:
        axis.remove()
    for axis, text in zip(axes, titles, strict=False):
        _plain(axis).set_title(text, fontsize=10)
    return figure, axes[: len(titles)]


def _plain(axis: Axes) -> Axes:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9)
    return axis


def _from_zero(axes: list[Axes]) -> None:
    """Makes a shared y axis begin at zero and end above the highest value of all axes."""
    axes[0].set_ylim(0, 1.07 * max(axis.dataLim.ymax for axis in axes))


def _label_left(axes: list[Axes], label: str) -> None:
    for axis in axes[:: min(_COLUMNS, len(axes))]:
        axis.set_ylabel(label)


def _load_axis(axis: Axes, loads: list[float], run: Run) -> None:
    if min(loads) > 0:
        axis.set_xscale("log", base=2)
    axis.set_xticks(loads, [f"{load:g}" for load in loads])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(run.kind.unit)


def _with_legend(figure: Figure, axes: list[Axes]) -> Figure:
    """Adds one legend below all panels, where it covers no data."""
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    longest = max(map(len, handles))
    columns = max(1, min(len(handles), 90 // (longest + 6)))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    return figure

"""Plots exist if there is data, show the measured values, and change nothing global."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from samples import cell, run, small_sweep, unequal

from sglang_dflash.bench import plots
from sglang_dflash.bench.frame import frame
from sglang_dflash.bench.records import Equality, Run


def drawn(held: Run, folder: Path) -> set[str]:
    """The names of the plots. Checks that each has a PNG and an SVG that are not empty."""
    paths = plots.draw(held, frame(held), folder, "run")
    assert sorted(paths) == sorted(folder.iterdir())
    assert all(path.stat().st_size > 3000 for path in paths)
    names = {suffix: {path.stem for path in paths if path.suffix == suffix} for suffix in (".png", ".svg")}
    assert names[".png"] == names[".svg"]
    return {name.removeprefix("run-") for name in names[".png"]}


def both(held: Run) -> tuple[Figure, Figure]:
    figures = plots._speedup(held, frame(held)), plots._pareto(held, frame(held))
    assert figures[0] is not None and figures[1] is not None
    return figures


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_plots_are_written_where_there_is_data(tmp_path: Path) -> None:
    """Fails if a plot is missing or empty, an empty one is drawn, matplotlib's defaults change or pyplot is imported,
    which chooses a backend."""
    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    assert drawn(small_sweep(), tmp_path / "all") == {"speedup", "pareto"}
    assert drawn(run([cell("off", 100)]), tmp_path / "off") == {"pareto"}
    assert drawn(run([cell("dflash", 1, failure="died")]), tmp_path / "failed") == set()
    assert drawn(run([]), tmp_path / "empty") == set()
    assert drawn(run([cell("dflash", 100, equality=unequal())]), tmp_path / "hidden") == set()
    assert dict(matplotlib.rcParams) == before and ("matplotlib.pyplot" in sys.modules) == pyplot


def test_withheld_arm_is_not_drawn() -> None:
    """Fails if a withheld arm has a line, an arm's colour depends on the others, or the speed of an engine whose tokens
    may differ is drawn without the share of identical requests."""
    vllm = cell("vllm", 200, equality=Equality("off", False, 40, 30))
    assert sorted(legend(both(run([cell("off", 100), vllm]))[0])) == ["off", "vllm (75% identical)"]
    held = run([cell("off", 100), cell("builtin", 200, equality=unequal()), cell("dflash", 300)])
    for figure, alone in zip(both(held), both(run([cell("off", 100), cell("dflash", 300)])), strict=True):
        assert set(legend(figure)) == {"off", "dflash"}
        colours = [{line.get_label(): line.get_color() for line in one.axes[0].get_lines()} for one in (figure, alone)]
        assert colours[0] == colours[1]


def test_speedup_holds_the_medians() -> None:
    """Fails if the line is not at the medians, the error bars are not at the extremes, or data are cut off."""
    speeds = {1: (200, 300, 400), 8: (150, 100, 125)}
    cells = [cell("off", 100, load, i) for load in speeds for i in range(3)]
    cells += [cell("dflash", tok_s, load, i) for load, held in speeds.items() for i, tok_s in enumerate(held)]
    figure, _ = both(run([*cells, cell("off", 100, dataset="hard"), cell("dflash", 900, dataset="hard")]))
    first, second = figure.axes
    assert first.containers[0].lines[0].get_xydata().tolist() == [[1, pytest.approx(3)], [8, pytest.approx(1.25)]]
    segments = first.containers[0].lines[2][0].get_segments()
    assert segments[0][:, 1].tolist() == pytest.approx([2, 4])
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["1", "8"]
    assert (first.get_xscale(), second.get_ylim()[0]) == ("log", 0) and second.get_ylim()[1] > 9


def test_pareto_numbers_its_points() -> None:
    """Fails if a point does not show its load, or lies outside the axes, or a legend covers a panel."""
    figures = both(small_sweep((1, 16), 1))
    for axis in figures[1].axes:
        assert [text.get_text() for text in axis.texts] == ["1", "16"] * 3
        assert axis.get_xlim()[1] > axis.dataLim.xmax and axis.get_ylim()[1] > axis.dataLim.ymax
    for figure in figures:
        figure.draw_without_rendering()
        top = figure.legends[0].get_window_extent().y1
        assert all(axis.get_window_extent().y0 > top for axis in figure.axes)

"""Plots exist if there is data, show the measured values, and change nothing global."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from samples import agent, cell, realistic, run, unequal

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


def panels(held: Run) -> dict[str, list[plots.Line]]:
    return plots._panels(frame(held))


def test_closed(tmp_path: Path) -> None:
    """Fails if a plot is missing, empty, or blank: a PNG must have the arms' colours."""
    assert drawn(realistic(loads=(1, 8), repeats=2), tmp_path) == {"speedup", "pareto"}
    image = matplotlib.image.imread(tmp_path / "run-speedup.png")
    red = (image[..., 0] > 0.7) & (image[..., 1] < 0.3) & (image[..., 2] < 0.4)
    assert image.shape[1] == 1350 and red.sum() > 500
    assert "<svg" in (tmp_path / "run-pareto.svg").read_text()


def test_loads_have_their_unit() -> None:
    """Fails if a plot calls a rate of sessions a number of sessions."""
    held = agent(turns=2, repeats=1, loads=(0.5,), workload="agent-open-loop")
    figure = plots._speedup(held, panels(held))
    assert figure is not None and figure.axes[0].get_xlabel() == "sessions/s"


def test_no_data_no_plot(tmp_path: Path) -> None:
    """Fails if an empty plot is drawn: without a baseline, or without measured cells."""
    assert drawn(run([cell("off", 100)]), tmp_path / "off") == {"pareto"}
    assert drawn(run([cell("dflash", 1, failure="died")]), tmp_path / "failed") == set()
    assert drawn(run([]), tmp_path / "empty") == set()
    assert drawn(run([cell("dflash", 100, equality=unequal())]), tmp_path / "hidden") == set()


def test_withheld_arm_is_not_drawn() -> None:
    """Fails if a withheld arm has a line in the speedup or Pareto plot."""
    held = run([cell("off", 100), cell("builtin", 200, equality=unequal()), cell("dflash", 300)])
    for figure in (plots._speedup(held, panels(held)), plots._pareto(held, panels(held))):
        assert figure is not None
        assert {text.get_text() for text in figure.legends[0].get_texts()} == {"off", "dflash"}


def test_speedup_holds_the_medians() -> None:
    """Fails if the line is not at the medians, the error bars are not at the extremes, or data are cut off."""
    speeds = {1: (200, 300, 400), 8: (150, 100, 125)}
    cells = [cell("off", 100, load, i) for load in speeds for i in range(3)]
    cells += [cell("dflash", tok_s, load, i) for load, held in speeds.items() for i, tok_s in enumerate(held)]
    held = run([*cells, cell("off", 100, dataset="hard"), cell("dflash", 900, dataset="hard")])
    figure = plots._speedup(held, panels(held))
    assert figure is not None
    first, second = figure.axes
    assert first.containers[0].lines[0].get_xydata().tolist() == [[1, pytest.approx(3)], [8, pytest.approx(1.25)]]
    segments = first.containers[0].lines[2][0].get_segments()
    assert segments[0][:, 1].tolist() == pytest.approx([2, 4])
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["1", "8"]
    assert (first.get_xscale(), second.get_ylim()[0]) == ("log", 0) and second.get_ylim()[1] > 9


def test_pareto_numbers_its_points() -> None:
    """Fails if a point does not show its load, or lies outside the axes."""
    held = realistic(loads=(1, 16), repeats=1)
    figure = plots._pareto(held, panels(held))
    assert figure is not None
    for axis in figure.axes:
        assert [text.get_text() for text in axis.texts] == ["1", "16"] * 4
        assert axis.get_xlim()[1] > axis.dataLim.xmax and axis.get_ylim()[1] > axis.dataLim.ymax


def test_colours_are_fixed_per_arm() -> None:
    """Fails if an arm's colour depends on which other arms ran, or two arms share one."""
    first, second = (panels(realistic(arms, (1,), 1))["gsm8k"] for arms in (("off", "dflash"), ("eagle3", "dflash")))
    assert first[1].colour == second[1].colour == plots.COLOURS["dflash"]
    assert len(set(plots.COLOURS.values())) == len(plots.COLOURS)


def test_other_engines_tell_their_share() -> None:
    """Fails if the speed of an engine whose tokens may differ is drawn without the share of identical requests."""
    held = run([cell("off", 100), cell("vllm", 200, equality=Equality("off", False, 40, 30))])
    figure = plots._speedup(held, panels(held))
    assert figure is not None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["off", "vllm (75% identical)"]


@pytest.mark.parametrize("workload", ["closed", "agent"])
def test_legends_lie_over_no_data(workload: str) -> None:
    """Fails if a legend covers a panel."""
    held = agent(turns=2, repeats=1) if workload == "agent" else realistic(loads=(1, 2), repeats=1)
    lines = panels(held)
    for figure in (plots._speedup(held, lines), plots._pareto(held, lines)):
        assert isinstance(figure, Figure)
        figure.draw_without_rendering()
        top = figure.legends[0].get_window_extent().y1
        assert all(axis.get_window_extent().y0 > top for axis in figure.axes)


def test_nothing_global_changes(tmp_path: Path) -> None:
    """Fails if drawing changes matplotlib's defaults, or imports pyplot, which chooses a backend."""
    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    drawn(realistic(loads=(1,), repeats=1), tmp_path)
    assert dict(matplotlib.rcParams) == before and ("matplotlib.pyplot" in sys.modules) == pyplot

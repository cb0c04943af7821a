"""Draws the Grafana dashboard's panels from a Prometheus server, with the same expressions, for the documentation.

python -m tools.measure.dashboard http://127.0.0.1:9090 --minutes 10 --out docs/dashboard.png
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/dflash.json"
POINTS = 240  # of a line


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. lines: its expressions with the names of their lines; unit: Grafana's name."""

    title: str
    unit: str
    stacked: bool
    lines: list[tuple[str, str]]


def panels(window: str, dashboard: Path = DASHBOARD) -> Iterator[Panel]:
    """The panels with expressions, which hold for all models and servers. window: of rates, such as `30s`."""
    values = {"$__rate_interval": window, "$model": ".*", "$instance": ".*"}
    for panel in json.loads(dashboard.read_text())["panels"]:
        lines = []
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            lines.append((expression, target["legendFormat"]))
        if lines:
            defaults = panel["fieldConfig"]["defaults"]
            yield Panel(panel["title"], defaults["unit"], "stacking" in defaults["custom"], lines)


def ask(url: str, path: str, **query: Any) -> list[dict[str, Any]]:
    """The series that Prometheus has at `path` of its API."""
    answer = httpx.get(f"{url}/api/v1/{path}", params=query, timeout=30.0).raise_for_status().json()
    return answer["data"]["result"]


def name_of(legend: str, labels: dict[str, str]) -> str:
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", value)
    return legend


def draw(url: str, minutes: float, window: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    end = time.time()
    span = {"start": end - 60 * minutes, "end": end, "step": 60 * minutes / POINTS}
    shown = list(panels(window))
    figure, axes = plt.subplots(-(-len(shown) // 3), 3, figsize=(15, 2.6 * -(-len(shown) // 3)), layout="constrained")
    for axis, panel in zip(axes.flat, shown, strict=False):
        found = {}
        for expression, legend in panel.lines:
            for series in ask(url, "query_range", query=expression, **span):
                times, values = zip(*series["values"], strict=True)
                percent = 100 if panel.unit == "percentunit" else 1
                minutes_ago = [(when - end) / 60 for when in times]
                found[name_of(legend, series["metric"])] = minutes_ago, [percent * float(value) for value in values]
        for name, (times, values) in sorted(found.items(), key=lambda item: (len(item[0]), item[0])):
            axis.plot(times, values, label=name, linewidth=1)
        units = {"percentunit": " (%)", "s": " (s)", "ops": " (per s)"}
        axis.set_title(panel.title + units.get(panel.unit, ""), fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6, ncols=2, frameon=False)
    figure.savefig(out, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of Prometheus")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--window", default="30s", help="of rates")
    parser.add_argument("--out", type=Path, default=Path("docs/dashboard.png"))
    options = parser.parse_args()
    draw(options.url, options.minutes, options.window, options.out)


if __name__ == "__main__":
    main()

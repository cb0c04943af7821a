"""The Grafana dashboard and Prometheus's rules: names that exist, alarms that fire. `test_served_metrics.py` of e2e
asks a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from sglang_dflash.core.step_counts import COUNTERS, LABELS, PREFIX
from sglang_source import SGLANG
from tools.measure.dashboard import DASHBOARD, panels

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules.yml"


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + [one for panel in panels("1m") for one, _ in panel.lines]


def test_series_exist() -> None:
    """Fails where an expression names a series, or one of our labels, that neither our worker, nor SGLang, nor a rule
    makes."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    ours = {f"{PREFIX}{name}_total" for name in COUNTERS}
    source = (SGLANG / "srt/observability/metrics_collector.py").read_text()
    sglangs = set(re.findall(r'"(sglang:\w+)"', source))
    used = {name for one in expressions() for name in re.findall(r"sglang(?:_dflash)?:[\w:]+", one)}
    assert {name for name in used if name.startswith(PREFIX)} <= ours | recorded
    assert {name.removesuffix("_bucket") for name in used if name.startswith("sglang:")} <= sglangs
    assert ours <= used, "a counter that nobody looks at"
    for name, label in LABELS.items():
        assert any(f"{PREFIX}{name}_total" in one and label in one for one in expressions())


def test_the_dashboard_names_its_variables() -> None:
    """Fails where an expression has a variable that the dashboard does not define, or two panels share an id."""
    board = json.loads(DASHBOARD.read_text())
    defined = {one["name"] for one in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) <= defined
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_alarms_fire() -> None:
    """Fails where an alarm stays silent about a draft that fits no more, one that is always right or one that is hardly
    asked, or where it fires for a sound or an idle server."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    ran = subprocess.run(
        [promtool, "test", "rules", "rules.test.yml"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

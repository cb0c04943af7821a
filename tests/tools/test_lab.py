"""The lab of GPU points runs on a CPU, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.matrix
def test_every_point_of_the_tiny_shape(tmp_path: Path) -> None:
    """Fails where an arm does not reach its last point, so that a loan of a GPU would bring nothing."""
    run = [sys.executable, "-m", "tools.gpu.lab", "--output", str(tmp_path), "--shape", "tiny", "--budget-s", "400"]
    said = subprocess.run(run, capture_output=True, text=True, timeout=500).stdout
    found = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    for arm, steps in {"widths": 14, "rows": 11, "off": 4}.items():
        assert f"{arm}: done" in said
        points = [point for point in found if (point["arm"], point["what"]) == (arm, "step")]
        assert len(points) == steps and all(point["step_ms"] > 0 for point in points), points
        assert all(point["draft_ms"] > 0 for point in points if point.get("width", 1) > 1)

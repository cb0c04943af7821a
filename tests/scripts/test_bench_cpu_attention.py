"""Runs the attention benchmark with its smallest settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_cpu_attention.py"


def test_every_case_is_compared_and_timed():
    """Fails where the benchmark no longer fits the ops that it times."""
    small = "--contexts 64 --batches 1 2 --rows 1 3 --repeats 2 --threads 1 --dtypes float32"
    run = subprocess.run([sys.executable, str(SCRIPT), *small.split()], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])["results"]
    assert [(result["batch"], result["rows"]) for result in results] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(result["native_us"] > 0 and result["torch_us"] > 0 for result in results)

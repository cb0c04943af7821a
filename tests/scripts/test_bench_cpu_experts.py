"""Runs the benchmark of experts with its smallest settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.ops import native

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_cpu_experts.py"


@pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_count_of_rows_is_compared_and_timed(dtype):
    """Fails where the benchmark no longer fits the op that it times."""
    small = f"--rows 1 8 --repeats 1 --threads 1 --dtype {dtype}"
    run = subprocess.run([sys.executable, str(SCRIPT), *small.split()], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    results = json.loads(run.stdout.splitlines()[-1])["results"]
    assert [result["rows"] for result in results] == [1, 8]
    assert all(result["native_ms"] > 0 and result["torch_ms"] > 0 for result in results)

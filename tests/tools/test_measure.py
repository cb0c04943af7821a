"""Runs the benchmarks of native ops with their smallest settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.ops import native

ROOT = Path(__file__).parents[2]


def results_of(name: str, words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", f"tools.measure.{name}", *words.split()]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])["results"]


def test_every_case_of_attention_is_compared_and_timed():
    """Fails where the benchmark no longer fits the ops that it times."""
    small = "--contexts 64 --batches 1 2 --rows 1 3 --repeats 2 --threads 1 --dtypes float32"
    results = results_of("bench_cpu_attention", small)
    assert [(result["batch"], result["rows"]) for result in results] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(result["native_us"] > 0 and result["torch_us"] > 0 for result in results)


@pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "rows", "more"),
    [("bench_cpu_experts", (1, 8), ""), ("bench_cpu_products", (1, 8, 80), "--pause-ms 1")],
)
def test_every_count_of_rows_is_compared_and_timed(dtype, name, rows, more):
    """Fails where the benchmark no longer fits the op that it times."""
    words = f"--rows {' '.join(map(str, rows))} --repeats 1 --threads 1 --dtype {dtype} {more}"
    results = results_of(name, words)
    assert [result["rows"] for result in results] == list(rows)
    assert all(result["native_ms"] > 0 and result["torch_ms"] > 0 for result in results)

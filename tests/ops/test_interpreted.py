"""Runs the tests of the Triton bodies (`test_triton_*.py`) under Triton's interpreter, in a separate process; and shows
what the ops and the tests for a GPU load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from interpreted import ROOT, run_interpreted


def test_triton_bodies_under_the_interpreter():
    """Fails where a test of a Triton body fails, or none runs."""
    run_interpreted(Path(__file__).parent.glob("test_triton_*.py"))


def test_ops_on_the_cpu_load_no_triton():
    """Fails where importing the ops, or calling one on CPU tensors, imports a Triton body."""
    script = (
        "import sys, torch; from sglang_dflash import ops\n"
        "ops.choose_kernels('cpu', torch.int64).accept_chain(*torch.zeros(2, 1, 2, dtype=torch.int64))\n"
        "print([name for name in sys.modules if 'sglang_dflash.ops.triton' in name])"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_the_tests_for_a_gpu_need_neither_sglang_nor_plugins():
    """Fails where `-m cuda` collects a file that imports anything else, or a plugin of pytest is needed."""
    absent = ("sglang", "hypothesis", "transformers", "pytest_timeout", "xdist", "httpx", "rich", "typer")
    script = (
        "import sys\n"
        f"sys.modules |= dict.fromkeys({absent})\n"
        "import pytest\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'cuda', 'tests/ops']))"
    )
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert "torch finds no CUDA device" in run.stdout and " passed" not in run.stdout, run.stdout[-2000:]

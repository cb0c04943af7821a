"""Runs the tests of the Triton bodies (`test_triton_*.py`) under Triton's interpreter, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from interpreted import run_interpreted


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

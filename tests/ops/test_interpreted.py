"""Runs the tests of the Triton bodies (`test_triton_*.py`) under Triton's interpreter, in a separate process.

Triton reads TRITON_INTERPRET when it is imported, and the other tests must not run with an interpreted Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def test_triton_bodies_under_the_interpreter():
    """Fails where a test of a Triton body fails, or none runs."""
    files = [str(path) for path in sorted(FOLDER.glob("test_triton_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=FOLDER.parents[1]
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout[-2000:]


def test_ops_on_the_cpu_load_no_triton():
    """Fails where importing the ops, or calling one on CPU tensors, imports a Triton body."""
    script = (
        "import sys, torch; from sglang_dflash import ops\n"
        "ops.accept_chain(*torch.zeros(2, 1, 2, dtype=torch.int64))\n"
        "print([name for name in sys.modules if 'sglang_dflash.ops.triton' in name])"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"

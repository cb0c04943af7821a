"""Runs the rehearsal of the fa3 backend (`fa3_*cases.py`) in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and other tests must get neither an interpreted Triton nor the stub
of the kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_fa3_backend_over_the_stub():
    """Fails where a case of the rehearsal fails, or none runs."""
    files = [str(path) for path in sorted(HERE.glob("fa3_*cases.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=HERE.parents[1]
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout[-2000:]

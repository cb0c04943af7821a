"""Runs test files in a process of their own, where Triton interprets its kernels.

Triton reads TRITON_INTERPRET when it is imported, and the other tests must not run with an interpreted Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_interpreted(files: Iterable[Path]) -> None:
    """Asserts that tests ran, that all of them passed, and that none was skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, sorted(files))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout, run.stdout[-2000:]

"""Runs the rehearsal of the fa3 backend (`fa3_*cases.py`) in a process of its own.

Its cases need an interpreted Triton and the stub of the kernels, and other tests must get neither.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreted import run_interpreted


@pytest.mark.slow
def test_fa3_backend_over_the_stub():
    """Fails where a case of the rehearsal fails, or none runs."""
    run_interpreted(Path(__file__).parent.glob("fa3_*cases.py"))

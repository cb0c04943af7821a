"""Shared by all tests of the ops."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Run by test_interpreted.py, in a process where Triton interprets its kernels.
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_triton_*.py"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out all other files with `-m cuda`: a GPU machine need not have what they import."""
    chosen = config.option.markexpr == "cuda"
    return True if chosen and collection_path.is_file() and not collection_path.match("test_cuda_*.py") else None


@pytest.fixture(autouse=True, scope="session")
def _small_tensors(one_thread: None) -> None:
    """All of them."""

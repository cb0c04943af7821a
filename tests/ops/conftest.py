"""Shared by all tests of the ops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Run by test_interpreted.py, in a process where Triton interprets its kernels.
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_triton_*.py"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out all other files with `-m cuda`: a GPU machine need not have what they import."""
    chosen = config.option.markexpr == "cuda"
    return True if chosen and collection_path.is_file() and not collection_path.match("test_cuda_*.py") else None


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Torch's threads spin between these tiny tensors, which makes the tests twenty times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

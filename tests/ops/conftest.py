"""What all tests of ops share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Run by test_interpreted.py, in a process where Triton interprets its kernels.
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_triton_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """These tensors are tiny, and torch's threads spin between them: on a busy machine twenty times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Something dear that both processes of a test run need, made by the first one that asks for it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from filelock import FileLock

Made = TypeVar("Made")


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder of this run, the same in all its processes."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def once(name: str, factory: pytest.TempPathFactory, make: Callable[[], Made]) -> Made:
    """What `make` returns, from a file of this run. Another process waits while one makes it."""
    file = run_folder(factory) / f"{name}.pickle"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(make()))
    return pickle.loads(file.read_bytes())

"""What all tests share: servers run uncompiled where a test does not ask, because compiling takes seconds a start; the
native ops are built before any test is collected."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from sglang_dflash.ops import native

os.environ.setdefault("SGLANG_DFLASH_COMPILE", "0")


def pytest_configure(config: pytest.Config) -> None:
    """Tests ask for the native ops while they are imported. Servers on a GPU do without, so none are built there."""
    if not torch.cuda.is_available():
        with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            native.build(lambda line: print(line, file=sys.stderr, flush=True))

"""Shared by the tests of the CPU platform's ops."""

from __future__ import annotations

import pytest
import torch

from sglang_cpu.ops import REFERENCE_KERNELS, Kernels, choose_kernels, native


@pytest.fixture
def native_ops() -> Kernels:
    if native.isa() is None:
        pytest.skip("the native ops are not built")
    return choose_kernels(torch.float32)


@pytest.fixture(params=["specification", "native"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return REFERENCE_KERNELS if request.param == "specification" else request.getfixturevalue("native_ops")


@pytest.fixture(autouse=True, scope="session")
def _small_tensors(one_thread: None) -> None:
    """All of them."""

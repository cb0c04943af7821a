"""tools/offline/complete.py finds the NCCL functions that a machine lacks and stubs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.offline import complete as module


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """tools/offline/complete.py on a venv with two tiny libraries: a torch that links two NCCL functions, and an NCCL
    that has one of them."""
    monkeypatch.setattr(module, "SITE", tmp_path)
    _library(tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2", "int ncclHas(void) { return 7; }")
    asks = "int ncclHas(void); int ncclLacks(void); int other(void);"
    asks += "int ask(int x) { return x ? ncclHas() : ncclLacks(); }"
    _library(tmp_path / "torch" / "lib" / "libtorch_cuda.so", asks)
    return module


def _library(place: Path, source: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", str(place), "-"], input=source, text=True, check=True)


def _ask(site: Path, first: str, x: int) -> subprocess.CompletedProcess:
    load = f"import ctypes; ctypes.CDLL({str(site / 'nvidia/nccl/lib/libnccl.so.2')!r}, mode=ctypes.RTLD_GLOBAL)\n"
    script = f"{first}\n{load}print(ctypes.CDLL({str(site / 'torch/lib/libtorch_cuda.so')!r}, mode=2).ask({x}))"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_what_a_library_asks_of_others(complete, tmp_path):
    """Fails where an undefined symbol is missed, or a defined or only declared one counts as undefined."""
    asked = complete.undefined_symbols(tmp_path / "torch" / "lib" / "libtorch_cuda.so")
    assert {"ncclHas", "ncclLacks"} <= set(asked)
    assert not {"ask", "other"} & set(asked)


def test_missing_functions_are_stubbed(complete, tmp_path, capsys):
    """Fails where the library does not load afterwards, an existing function is replaced, or a stub returns."""
    assert _ask(tmp_path, "", 1).returncode != 0  # RTLD_NOW: an undefined function is an error
    complete.stub_nccl()
    assert "ncclLacks" in capsys.readouterr().out
    line = (tmp_path / "_nccl_lacks.pth").read_text()
    assert _ask(tmp_path, line, 1).stdout.strip() == "7"
    called = _ask(tmp_path, line, 0)
    assert called.returncode != 0 and "ncclLacks" in called.stderr


def test_nothing_is_stubbed_where_nothing_lacks(complete, tmp_path):
    """Fails where a complete NCCL gets stubs, or a machine without NCCL gets an error."""
    whole = "int ncclHas(void) { return 7; } int ncclLacks(void) { return 8; }"
    _library(tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2", whole)
    complete.stub_nccl()
    (tmp_path / "nvidia/nccl/lib/libnccl.so.2").unlink()
    complete.stub_nccl()
    assert not (tmp_path / "_nccl_lacks.pth").exists()

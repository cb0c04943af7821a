"""The native ops are built wherever they can be, are right for each instruction set, and torch serves without them.

How they are built: test_build_native.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_cpu import ops
from sglang_cpu.ops import build_native, native

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = ["avx512", "avx2", "scalar"]


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "4"} | variables
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="not built on a GPU machine")
def test_the_ops_are_built_where_they_can_be():
    """Fails where the ops are missing although they can be built: conftest.py builds them before all tests."""
    if not native.enabled() or native.LIBRARY in os.environ:
        pytest.skip(f"native ops: {native.described()}")
    reason = build_native.reason_not_to_build()
    assert native.isa() is not None or reason is not None, native.described()


@pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
@pytest.mark.parametrize("isa", NAMES)
def test_every_instruction_set(isa):
    """Fails where the kernels of another instruction set, which the other tests do not use, are wrong."""
    if isa == native.isa():
        pytest.skip("the other tests of this folder use it")
    names = [f"tests/cpu/test_native_{part}.py" for part in ("attention", "linear", "rows")]
    names += [f"tests/cpu/test_{part}.py" for part in ("recurrent", "selective_scan", "experts")]
    if NAMES.index(isa) < NAMES.index(str(native.isa())):
        refused = run_python("-c", "from sglang_cpu.ops import native; native.isa()", SGLANG_DFLASH_ISA=isa)
        assert "allowed: what this machine has of" in refused.stderr
        pytest.skip(f"this machine has no {isa}")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *names, SGLANG_DFLASH_ISA=isa)
    assert done.returncode == 0, done.stdout[-3000:]


def test_an_unknown_instruction_set_is_refused():
    """Fails where a misspelt instruction set means the default."""
    if native.isa() is None:
        pytest.skip(f"native ops: {native.described()}")
    script = "from sglang_cpu.ops import native; native.isa()"
    assert "SGLANG_DFLASH_ISA is 'sse9'" in run_python("-c", script, SGLANG_DFLASH_ISA="sse9").stderr


def test_a_library_of_other_sources_is_refused(monkeypatch, tmp_path):
    """Fails where SGLANG_DFLASH_NATIVE_LIBRARY may name a library that computes what these sources do not mean."""
    if native.isa() is None:
        pytest.skip(f"native ops: {native.described()}")
    monkeypatch.setenv(native.LIBRARY, str(native.library_path()))
    shutil.copytree(build_native.FOLDER, tmp_path / "csrc")
    (tmp_path / "csrc/bindings.cpp").open("a").write("//")
    monkeypatch.setattr(build_native, "FOLDER", tmp_path / "csrc")
    with pytest.raises(ImportError, match="was built from other sources than this package has: build it anew"):
        native.isa.__wrapped__()


def test_the_switch_leaves_the_specification():
    """Fails where SGLANG_DFLASH_NATIVE=0 keeps a native body in use, or the start-up line does not report it."""
    script = (
        "import torch\nfrom sglang_cpu import ops\nprint(ops.native.described())\n"
        "assert ops.choose_kernels(torch.float32) is ops.REFERENCE_KERNELS\n"
    )
    done = run_python("-c", script, SGLANG_DFLASH_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "left out (SGLANG_DFLASH_NATIVE=0), the specification instead"


def test_other_tensors_get_the_specification():
    """Fails where a native body is chosen for tensors that it does not take."""
    for kernels in (
        ops.choose_kernels(torch.float16),
        ops.choose_kernels(torch.float32, torch.float8_e5m2),
    ):
        assert kernels is ops.REFERENCE_KERNELS


@pytest.mark.skipif(native.isa() is None, reason=f"native ops: {native.described()}")
def test_a_library_that_does_not_fit_is_named(tmp_path):
    """Fails where ops that were built for another torch are ignored without an error."""
    wrong = tmp_path / "wrong.so"
    wrong.write_bytes(b"not a library")
    script = "from sglang_cpu.ops import native; native.isa()"
    assert "does not load with torch" in run_python("-c", script, SGLANG_DFLASH_NATIVE_LIBRARY=str(wrong)).stderr

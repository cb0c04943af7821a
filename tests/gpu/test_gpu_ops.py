"""Tests the logic of gpu.ops: a dry run of every stage with tiny shapes on a CPU, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"SGLANG_DFLASH_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts" / "gpu_ops.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_every_stage_runs_dry(tmp_path):
    """Fails where a stage raises, finds an op wrong, or leaves no rows in the JSON."""
    run = _run("--dry-run", "--output", str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    content = json.loads((tmp_path / "gpu_ops.json").read_text())
    assert content["machine"]["dry"] and content["machine"]["copy_gb_s"] > 0
    assert content["failures"] == {} and "commit" in content
    assert set(content["stages"]) == {
        "block_layout",
        "acceptance",
        "accept_chain",
        "context_kv",
        "toy_step",
        "eager_launches",
        "acceptance_sweep",
    }
    assert all(content["stages"].values())
    for rows in content["stages"].values():
        assert f"  {next(iter(rows[0]))}" in run.stdout  # the table's first column


def test_only_the_asked_stages_run(tmp_path):
    """Fails where --stages or an unknown stage is ignored."""
    run = _run("--dry-run", "--output", str(tmp_path), "--stages", "block_layout")
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(json.loads((tmp_path / "gpu_ops.json").read_text())["stages"]) == ["block_layout"]
    run = _run("--dry-run", "--output", str(tmp_path), "--stages", "nonesuch")
    assert run.returncode == 2 and "nonesuch" in run.stderr


def test_a_wrong_op_fails_the_run_and_the_others_still_count(tmp_path):
    """Fails where a stage that finds a wrong op is not reported, or ends the run."""
    script = (
        "import os, runpy, sys; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from sglang_dflash.ops import triton_block\n"
        "right = triton_block.block_layout\n"
        "triton_block.block_layout = lambda *a: (lambda i, p, s: (i, p + 1, s))(*right(*a))\n"
        f"sys.argv = ['gpu_ops', '--dry-run', '--output', {str(tmp_path)!r}]\n"
        "sys.argv += ['--stages', 'block_layout', 'accept_chain']\n"
        "runpy.run_module('sglang_dflash.gpu.ops', run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    content = json.loads((tmp_path / "gpu_ops.json").read_text())
    assert "differs" in content["failures"]["block_layout"]
    assert list(content["stages"]) == ["accept_chain"]


def test_a_run_that_is_killed_keeps_its_rows(tmp_path):
    """Fails where rows wait for the end of their stage, half a stage passes for a whole one, or a later run of other
    stages loses them."""
    script = [sys.executable, "-m", "sglang_dflash.gpu.ops", "--dry-run", "--output", str(tmp_path)]
    process = subprocess.Popen([*script, "--stages", "toy_step"], stdout=subprocess.DEVNULL)
    place = tmp_path / "gpu_ops.json"
    while process.poll() is None and not (place.exists() and json.loads(place.read_text())["stages"].get("toy_step")):
        time.sleep(0.02)
    process.kill()
    process.wait()
    held = json.loads(place.read_text())
    assert held["stages"]["toy_step"] and held["running"] == "toy_step"
    assert _run("--dry-run", "--output", str(tmp_path), "--stages", "accept_chain").returncode == 0
    after = json.loads(place.read_text())
    assert after["stages"]["toy_step"] == held["stages"]["toy_step"] and after["stages"]["accept_chain"]
    assert after["failures"] == {"toy_step": "its run was cut; the rows before are kept"}


def test_captured_steps_read_memory_that_stays():
    """Fails where a variant of the toy step replaces tensors that an earlier graph has captured."""
    script = (
        "import os, sys; os.environ['TRITON_INTERPRET'] = '1'\n"
        "import torch\n"
        "from sglang_dflash.gpu.device import pick\n"
        "from sglang_dflash.gpu.toy_step import TINY, Models, Step, _variants\n"
        "step = Step(Models(TINY, 'cpu', 7), 2, 2, 5)\n"
        "def held(): return {n: id(v) for n, v in vars(step).items() if isinstance(v, torch.Tensor | tuple)}\n"
        "before = held()\n"
        "for call in _variants(pick(True), step).values(): call()\n"
        "assert held() == before, 'a tensor was replaced'"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_dflash.gpu import toy_kernels as kernels

def build(kernel, pointers, numbers=(), **constants):
    names = kernel.arg_names
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(numbers, "i32")
    types |= {"cos_sin": "*fp32"} if "cos_sin" in types else {}
    assert set(types) | set(constants) == set(names), names
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=dict.fromkeys(names, "constexpr") | types, constexprs=values, attrs={})
    compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))

build(kernels._add_rms_norm_kernel, ["x", "residual", "weight", "out"], EPS=1e-6, WIDTH=4096, LANES=4096)
build(kernels._silu_mul_kernel, ["gate_up", "out"], WIDTH=12288, BLOCK=1024)
pointers = ["qkv", "q_weight", "k_weight", "cos_sin", "q_out", "k_cache", "v_cache"]
for rows in (1, 16):
    shape = {"ROWS": rows, "GROUPS": 4, "KV_HEADS": 8, "DIM": 128}
    build(kernels._qk_norm_rope_kernel, pointers, ["prefix", "capacity"], **shape)
"""


@pytest.mark.parametrize("capability", [90, 100])
def test_the_toy_kernels_compile(capability, tmp_path):
    """Fails where a kernel of the toy step does not compile for a GPU, although the interpreter runs it."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr[-3000:]

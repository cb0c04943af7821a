"""Runs the rehearsal of SGLang's ring of updates (`ring_cases.py`) in a process of its own, and shows that its kernels
compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreted import run_interpreted

SCRIPT = """
import sys
from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode as ring
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"h0": "*fp32", "write_pos": "*i32", "cache_base": "*i32", "is_flush_flags": "*i8", "replay_indices": "*i64"}
POINTERS |= {"ssm_state_indices": "*i32", "g_cache": "*fp32", "mamba_track_indices": "*i64", "accept_lens": "*i32"}
POINTERS |= {"mamba_steps_to_track": "*i64"}
kernel, places = ring.gdn_replayssm_compact_commit_kernel, int(sys.argv[2])
types = POINTERS | dict.fromkeys(("d_cache", "k_cache", "d_residual_cache", "k_residual_cache"), "*bf16")
constants = {"H": 16, "HV": 48, "K": 128, "V": 128, "BV": 64, "MAX_CACHE_LEN": places, "NULL_BLOCK_ID": -1}
constants |= {"HAS_TRACK": True, "HAS_RESIDUAL": True}
names = kernel.arg_names
constants |= {name: 1 for name in names if name.startswith("stride_")}
assert set(types) | set(constants) == set(names), names
signature = dict.fromkeys(names, "constexpr") | types
constexprs = {(names.index(name),): value for name, value in constants.items()}
compile(ASTSource(kernel, signature, constexprs=constexprs), target=GPUTarget("cuda", int(sys.argv[1]), 32))
"""


@pytest.mark.slow
def test_kernels_of_the_ring() -> None:
    """Fails where a case of the rehearsal fails, or none runs."""
    run_interpreted([Path(__file__).with_name("ring_cases.py")])


@pytest.mark.slow
@pytest.mark.parametrize(("places", "compiles"), [(16, True), (64, True), (8, False)])
def test_the_fewest_places_that_compile(places: int, compiles: bool, tmp_path: Path) -> None:
    """Fails where a commit over the fewest places that we allow does not compile, or one over fewer would."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, "90", str(places)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert (run.returncode == 0) == compiles and (compiles or "K >= 16" in run.stderr), run.stderr[-3000:]

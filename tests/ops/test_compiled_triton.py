"""Every Triton body compiles for Hopper and Blackwell, without a GPU: to machine code if ptxas supports the target."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_dflash.ops import triton_acceptance as acceptance, triton_block as block, triton_context_kv as context_kv
from sglang_dflash.ops import triton_penalties as penalties, triton_sampling as sampling

def build(kernel, capability, types, warps=4, **constants):
    names = kernel.arg_names
    signature = dict.fromkeys(names, "constexpr") | types
    assert set(types) | set(constants) == set(names), names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in types if types[name] != "fp32"}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    built = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    return built.asm["ptx"]

capability = int(sys.argv[1])
for dtype in ("*bf16", "*fp32"):
    types = {"logits": dtype, "partials": "*i64", "vocab": "i32", "row_stride": "i32", "split_blocks": "i32"}
    ptx = build(acceptance._split_argmax_kernel, capability, types, BLOCK=2048)
    assert "ld.global.v4" in ptx, "logits are read element by element"
types = {"partials": "*i64", "target_ids": "*i64", "rows": "i32", "splits": "i32"}
build(acceptance._reduce_kernel, capability, types, MAX_SPLITS=64, ROWS=16)
types = {"choices": "*i64", "ids": "*i64", "out_ids": "*i64", "commit_lens": "*i32", "bonus_ids": "*i64"}
types |= {"splits": "i32"}
for splits in (0, 64):
    build(acceptance._accept_kernel, capability, types, WIDTH=16, MAX_SPLITS=splits, LANES=16)
types = {"logits": "*fp32", "row_stride": "i32", "block_rows": "*i64", "block_lens": "*i64", "rows": "*i64"}
types |= {"block_ids": "*i64", "seen": "*u8", "sums": "*fp32", "lens": "*i64", "frequency": "*fp32"}
types |= {"presence": "*fp32", "repetition": "*fp32", "min_new_tokens": "*i64", "stop_ids": "*i64"}
types |= {"num_stops": "i32", "vocab": "i32"}
ptx = build(penalties._penalize_kernel, capability, types, column_stride=1, WIDTH=16, SPAN=1024)
assert "div.rn.f32" in ptx and "ld.global.v" in ptx, "the scaling is rounded otherwise than the host's"
types = {"requests": "*i64", "rows": "*i64", "ids": "*i64", "counts": "*i32", "seen": "*u8", "sums": "*fp32"}
types |= {"lens": "*i64", "frequency": "*fp32", "vocab": "i32"}
build(penalties._append_kernel, capability, types, WIDTH=16, LANES=16)
types = {"logits": "*fp32", "row_stride": "i32", "vocab": "i32", "requests": "*i64", "temperatures": "*fp32"}
types |= {"top_ks": "*i32", "top_ps": "*fp32", "uniform": "*fp32", "ids": "*i64"}
shape = {"BLOCK": sampling.BLOCK, "STAGES": sampling.STAGES, "warps": sampling.WARPS}
for any_id in (False, True):
    ptx = build(sampling._sample_kernel, capability, types, ANY_ID=any_id, **shape)
    assert "ld.global.v4" in ptx, "logits are read element by element"
types = {"bonus_ids": "*i64", "prefix_lens": "*i64", "req_pool_indices": "*i64", "req_to_token": "*i32"}
types |= {"table_stride": "i32", "out": "*i64", "plane": "i32", "mask_token_id": "i32"}
build(block._block_layout_kernel, capability, types, WIDTH=16, LANES=16)
types = {"kv": "*bf16", "k_norm_weight": "*bf16", "positions": "*i64", "cos_sin": "*fp32", "slots": "*i64"}
types |= {"pointers": "*i64", "slot_stride": "i32", "eps": "fp32"}
shape = {"LAYERS": 5, "HEADS": 8, "DIM": 128, "ROTARY": 128, "HEAD_LANES": 8, "DIM_LANES": 128}
build(context_kv._write_context_kv_kernel, capability, types, FP8=True, **shape)
ptx = build(context_kv._write_context_kv_kernel, capability, types, FP8=False, **shape)
assert "st.global.v4" in ptx and "st.global.b16" not in ptx, "keys and values are written element by element"
"""


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile(capability, tmp_path):
    """Fails where a kernel does not compile for the capability, or loads or stores element by element."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr[-3000:]

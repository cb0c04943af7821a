"""Loads the compiled ops of `csrc/`, and tells whether they are there and what they take.

They are `torch.ops.sglang_cpu.*` and take CPU tensors of float32 and bfloat16. `SGLANG_DFLASH_NATIVE=0` leaves them
out. Their kernels are those of the machine's widest instruction set, unless `SGLANG_DFLASH_ISA=avx512|avx2|scalar`
names another (scalar: the compiler's baseline).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16)
SWITCH = "SGLANG_DFLASH_NATIVE"
LIBRARY = "SGLANG_DFLASH_NATIVE_LIBRARY"  # another build of the ops, e.g. one with sanitizers
_CURE = f"build it anew (python -m sglang_cpu.ops.build_native), unset {LIBRARY}, or leave it out ({SWITCH}=0)"


@cache
def isa() -> str | None:
    """The instruction set of the native kernels in this process; None if the specification serves.

    Raises:
        ImportError: the library does not load, or was built from other sources.
        RuntimeError: SGLANG_DFLASH_ISA names an instruction set that this machine lacks.
    """
    path = library_path() if enabled() else None
    if path is None:
        return None
    _load(path)
    _register_fakes()
    return str(torch.ops.sglang_cpu.isa())


def _load(path: Path) -> None:
    """Loads the library, which registers its ops with torch."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(f"{path} does not load with torch {torch.__version__} ({error}): {_CURE}.") from error
    if torch.ops.sglang_cpu.sources() != _builder().sources_digest():
        raise ImportError(f"{path} was built from other sources than this package has: {_CURE}.")


def build(say: Callable[[str], None]) -> None:
    """Builds the library if it is missing and wanted; `isa` then loads it. Without it, the specification serves.

    say: is told what is built and how long it took, or in one line why it is not built.
    """
    if not enabled() or LIBRARY in os.environ or isa() is not None:
        return
    builder = _builder()
    try:
        builder.build(say)
    except builder.CannotBuildError as reason:
        say(f"{builder.THE_OPS} are not built, so the slower specification serves: {reason}.")
    isa.cache_clear()


def _builder() -> Any:
    """`build_native`, imported late: `python -m` runs it, and warns of a module that has been imported before."""
    from sglang_cpu.ops import build_native

    return build_native


def enabled() -> bool:
    return os.environ.get(SWITCH, "1") != "0"


def library_path() -> Path | None:
    """Path of the compiled ops; None if they were not built."""
    if LIBRARY in os.environ:
        return Path(os.environ[LIBRARY])
    path: Path | None = _builder().built()
    return path


def described() -> str:
    """For the start-up log: the instruction set in use, or why the specification serves instead."""
    if not enabled():
        return f"left out ({SWITCH}=0), the specification instead"
    return isa() or "not built, the specification instead"


def serves(device: torch.device | str, *dtypes: torch.dtype) -> bool:
    """Whether the native bodies take tensors of these dtypes on this device."""
    return torch.device(device).type == "cpu" and all(dtype in DTYPES for dtype in dtypes) and isa() is not None


def install_linear() -> None:
    """Replaces torch's CPU products of few rows with a dense weight (`F.linear`, `mm`, `addmm`) by the op `linear`.

    It holds for the rest of this process and for float32 and bfloat16. A row's result then does not depend on other
    rows, bit for bit, and a weight is read once for all rows. It applies to up to 128 rows, and to any number of
    bfloat16 rows if the CPU has no instructions that multiply bfloat16. For more rows, and without AVX2, torch's BLAS
    is faster and stays in use.
    """
    if isa() is not None:
        torch.ops.sglang_cpu.install_linear()


def _register_fakes() -> None:
    """Registers the shapes and dtypes of the results, so that `torch.compile` can trace through the ops."""

    @torch.library.register_fake("sglang_cpu::paged_attention")
    def _(q, k_cache, v_cache, *rest):  # type: ignore[no-untyped-def]
        return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[2])

    @torch.library.register_fake("sglang_cpu::linear")
    def _(x, weight, addend):  # type: ignore[no-untyped-def]
        return x.new_empty(x.shape[0], weight.shape[0])

    @torch.library.register_fake("sglang_cpu::write_and_attend")
    def _(q, k, v, slots, k_cache, v_cache, *rest):  # type: ignore[no-untyped-def]
        heads = q.flatten(1).shape[1] // k_cache.shape[2]
        return q.new_empty(q.shape[0], heads * v_cache.shape[2])

    @torch.library.register_fake("sglang_cpu::norm_rope_")
    def _(*args):  # type: ignore[no-untyped-def]
        return None

    @torch.library.register_fake("sglang_cpu::rms_norm")
    def _(x, weight, eps):  # type: ignore[no-untyped-def]
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.library.register_fake("sglang_cpu::add_rms_norm")
    def _(x, residual, weight, eps):  # type: ignore[no-untyped-def]
        one, other = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        return one, other

    @torch.library.register_fake("sglang_cpu::causal_conv")
    def _(x, *rest):  # type: ignore[no-untyped-def]
        return x.new_empty(x.shape)

    @torch.library.register_fake("sglang_cpu::delta_gates")
    def _(a, b, *rest):  # type: ignore[no-untyped-def]
        g, beta = (x.new_empty(x.shape, dtype=torch.float32) for x in (a, b))
        return g, beta

    @torch.library.register_fake("sglang_cpu::delta_rule")
    def _(qkv, g, beta, num_k_heads, states, *rest):  # type: ignore[no-untyped-def]
        return qkv.new_empty(len(qkv), states.shape[1], states.shape[2])

    @torch.library.register_fake("sglang_cpu::selective_scan")
    def _(xbc, dt, a, dt_bias, skip, num_groups, states, *rest):  # type: ignore[no-untyped-def]
        return xbc.new_empty(len(xbc), states.shape[1], states.shape[2])

    @torch.library.register_fake("sglang_cpu::gated_rms_norm")
    def _(x, gate, weight, eps, silu=True, gate_first=False):  # type: ignore[no-untyped-def]
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.library.register_fake("sglang_cpu::experts")
    def _(x, *rest):  # type: ignore[no-untyped-def]
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @torch.library.register_fake("sglang_cpu::row_argmax")
    def _(logits):  # type: ignore[no-untyped-def]
        return logits.new_empty(len(logits), dtype=torch.int64)

    @torch.library.register_fake("sglang_cpu::best_log_probs")
    def _(logits):  # type: ignore[no-untyped-def]
        return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits), dtype=torch.float32)

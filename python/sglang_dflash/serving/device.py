"""Flags of `sglang.launch_server` that depend on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dflash.core.device import on_cuda


def device_flags(given: Sequence[str] = ()) -> list[str]:
    """`--device cpu` on a machine without CUDA, where SGLang must be told; nothing if `given` names a device."""
    return [] if on_cuda() or "--device" in given else ["--device", "cpu"]


def tiny_dtype() -> str:
    """The dtype for the embedded pairs: on a CPU answers are exact in float32, which SGLang does not take on CUDA."""
    return "bfloat16" if on_cuda() else "float32"


def tiny_flags(tokens_on_cpu: int, dtype: str = "") -> list[str]:
    """Dtype and size of the KV pool for a server of an embedded pair.

    Args:
        tokens_on_cpu: size of the pool without CUDA; a GPU has room for more.
        dtype: another one than this machine's.
    """
    return ["--dtype", dtype or tiny_dtype(), "--max-total-tokens", str(65536 if on_cuda() else tokens_on_cpu)]

"""Finds out, before a server is started, whether SGLang's own DFLASH worker can start on this GPU machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

HEADERS = ("include", "csrc", "cutlass/include", "cutlass/tools/util/include", "spdlog/include")
"""Folders in flashinfer/data, as SGLang's `get_flashinfer_include_paths` asks for them (kernels/jit/utils/deps.py)."""


def why_no_builtin() -> str:
    """Why the built-in worker cannot start on CUDA; "" if nothing is known against it.

    At start-up it compiles a sampling kernel with FlashInfer's headers (`prewarm_sampling`), and ends without them.
    """
    spec = find_spec("flashinfer")
    data = Path(spec.origin).parent / "data" if spec is not None and spec.origin else None
    if data is None:
        lacking = "FlashInfer, which is not installed"
    elif absent := [name for name in HEADERS if not (data / name).exists()]:
        lacking = f"FlashInfer's headers, and flashinfer/data lacks {', '.join(absent)}"
    else:
        return ""
    return f"Without the built-in worker: at start-up it compiles a sampling kernel with {lacking}."

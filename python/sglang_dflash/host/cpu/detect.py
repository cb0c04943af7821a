"""Whether this process serves on our CPU platform. Imports torch, never sglang."""

from __future__ import annotations

import os
from functools import cache


@cache
def cpu_platform_active() -> bool:
    """True where no accelerator is present and SGLang's own CPU engine was not asked for.

    `SGLANG_USE_CPU_ENGINE=1` means SGLang's AMX engine, which needs the CPU build of `sgl_kernel`.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    import torch

    return torch.accelerator.current_accelerator(check_available=True) is None

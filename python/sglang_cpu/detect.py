"""Detects whether our CPU platform applies to this machine, and whether SGLang uses it."""

from __future__ import annotations

import os
from functools import cache

ATTENTION_BACKEND = "dflash_cpu"


@cache
def cpu_platform_active() -> bool:
    """True where no accelerator is present and SGLang's own CPU engine was not asked for.

    `SGLANG_USE_CPU_ENGINE=1` means SGLang's AMX engine, which needs the CPU build of `sgl_kernel`.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    import torch

    return torch.accelerator.current_accelerator(check_available=True) is None


def cpu_platform_in_use() -> bool:
    """True where SGLang's active platform is ours (not merely installed: `SGLANG_PLATFORM` may name another)."""
    from sglang.srt.platforms import current_platform

    return type(current_platform).__module__ == "sglang_cpu.platform"


def activate_platform() -> str | None:
    """Entry point of group `sglang.srt.platforms`: our CPU platform if no accelerator is present.

    Returns:
        The class to load; None keeps SGLang's own platform.
    """
    return "sglang_cpu.platform.CpuPlatform" if cpu_platform_active() else None

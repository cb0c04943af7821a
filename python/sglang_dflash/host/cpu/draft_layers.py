"""Replaces DFlash2's convolution on a plain CPU, which the host compiles with inductor."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_dflash import ops


def convolve(conv: Any, hidden: torch.Tensor, delta: torch.Tensor, side: int) -> torch.Tensor:
    """The host's needs a C++ compiler, and compiles anew while it serves when the width of the steps changes.

    Args:
        conv: the host's `DFlashGroupedConv`, whose `block_size` is that of the step.
        hidden: [N, H]; delta: [N, taps, G].
        side: 0 before the sublayer, 1 behind it.
    """
    return ops.grouped_conv(hidden, delta, conv.base_kernel[side], conv.block_size)


HOOKS: dict[str, tuple[Any, HookType]] = {
    "sglang.srt.models.dflash.DFlashGroupedConv._convolve": (convolve, HookType.REPLACE),
}
"""Hook target -> (our function, how it is applied)."""

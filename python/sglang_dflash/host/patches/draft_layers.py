"""DFlash2's convolution where SGLang's does not serve: on a CPU, and over fewer rows than it has taps."""

from __future__ import annotations

from typing import Any

import torch

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash import ops


@hook(
    "sglang.srt.models.dflash.DFlashGroupedConv._convolve",
    AROUND,
    why="compiled by inductor: on a CPU it needs a C++ compiler, and compiles anew at another width; fewer rows than "
    "taps have no shape",
    until="SGLang leaves it eager and takes any width",
    always=True,
)
def convolve(original: Any, conv: Any, hidden: torch.Tensor, delta: torch.Tensor, side: int) -> torch.Tensor:
    """
    Args:
        conv: SGLang's `DFlashGroupedConv`, whose `block_size` is that of the step.
        hidden: [N, H]; delta: [N, taps, G].
        side: 0 before the sublayer, 1 behind it.
    """
    if hidden.is_cuda and len(hidden) >= conv.taps:
        return original(conv, hidden, delta, side)
    return ops.grouped_conv(hidden, delta, conv.base_kernel[side], conv.block_size)

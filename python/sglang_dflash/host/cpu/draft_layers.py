"""Replaces DFlash2's convolution on a plain CPU, which the host compiles with inductor."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash import ops
from sglang_dflash.host.hooking import REPLACE, hook


@hook(
    "sglang.srt.models.dflash.DFlashGroupedConv._convolve",
    REPLACE,
    why="compiled by inductor: needs a C++ compiler, and compiles anew at another width",
    until="SGLang leaves it eager",
)
def convolve(conv: Any, hidden: torch.Tensor, delta: torch.Tensor, side: int) -> torch.Tensor:
    """The host's needs a C++ compiler, and compiles anew while it serves when the width of the steps changes.

    Args:
        conv: the host's `DFlashGroupedConv`, whose `block_size` is that of the step.
        hidden: [N, H]; delta: [N, taps, G].
        side: 0 before the sublayer, 1 behind it.
    """
    return ops.grouped_conv(hidden, delta, conv.base_kernel[side], conv.block_size)

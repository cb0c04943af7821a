"""Chooses the policy that sets the width of each step."""

from __future__ import annotations

import logging
import os

from sglang_dflash.core.width import AdaptiveWidth, FullWidth, WidthPolicy
from sglang_dflash.host import simulated

logger = logging.getLogger(__name__)
VARIABLE = "SGLANG_DFLASH_WIDTH"
POLICIES = ("adaptive", "full")


def check(device: str, tp_size: int) -> None:
    """Raises ValueError if the variable is none of POLICIES, or is adaptive on a server that needs full width."""
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in POLICIES:
        raise ValueError(f"{VARIABLE} is {asked!r}; allowed: {', '.join(POLICIES)}.")
    reason = why_full(device, tp_size)
    if asked == "adaptive" and reason is not None:
        raise ValueError(f"Adaptive width ({VARIABLE}) needs {reason}. Use full.")


def why_full(device: str, tp_size: int) -> str | None:
    """What adaptive width needs and this server lacks, and why; None if it lacks nothing."""
    if device != "cpu":
        return f"--device cpu, not {device}, because an accelerator's graphs are captured for whole blocks"
    if tp_size > 1:
        return f"--tp-size 1, not {tp_size}, because ranks could choose different widths"
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    return None


def choose_width_policy(block_size: int, device: str, tp_size: int) -> WidthPolicy:
    """The policy that the variable names; without it, adaptive if this server can adapt, else full."""
    if os.environ.get(VARIABLE) == "full" or why_full(device, tp_size) is not None:
        return FullWidth(block_size)
    message = "Steps draft and verify 1 to %d rows, for the most tokens per second; %s=full fixes the width."
    logger.info(message, block_size, VARIABLE)
    return AdaptiveWidth(block_size)

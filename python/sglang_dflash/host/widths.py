"""Which policy chooses the width of a step."""

from __future__ import annotations

import logging
import os

from sglang_dflash.core.width import AdaptiveWidth, FullWidth, WidthPolicy
from sglang_dflash.host import simulated

logger = logging.getLogger(__name__)
VARIABLE = "SGLANG_DFLASH_WIDTH"
POLICIES = ("adaptive", "full")


def check(device: str, tp_size: int) -> None:
    """Raises ValueError where the variable is none of POLICIES, or asks for what cannot be had."""
    asked = os.environ.get(VARIABLE, "")
    if asked and asked not in POLICIES:
        raise ValueError(f"{VARIABLE} is {asked!r}; allowed: {', '.join(POLICIES)}.")
    reason = why_full(device, tp_size)
    if asked == "adaptive" and reason is not None:
        raise ValueError(f"{VARIABLE} is adaptive, but {reason}: full is what can be had.")


def why_full(device: str, tp_size: int) -> str | None:
    """What rules adaptive widths out; None where nothing does."""
    if device != "cpu":
        return "an accelerator's graphs are captured for whole blocks"
    if tp_size > 1:
        return f"of --tp-size {tp_size} ranks each would choose a width of its own"
    if simulated.simulates():
        return f"{simulated.VARIABLE} draws commit lengths for whole blocks"
    return None


def choose_width_policy(block_size: int, device: str, tp_size: int) -> WidthPolicy:
    """What the variable says; where it says nothing, adaptive wherever it can be had."""
    if os.environ.get(VARIABLE) == "full" or why_full(device, tp_size) is not None:
        return FullWidth(block_size)
    logger.info("Steps draft and verify 1 to %d rows, by what they bring; %s=full fixes it.", block_size, VARIABLE)
    return AdaptiveWidth(block_size)

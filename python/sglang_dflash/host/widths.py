"""Chooses the policy that plans the rows of each step."""

from __future__ import annotations

import os

from sglang_dflash.core.plan import Planner, Policy
from sglang_dflash.host import simulated

WIDTH, TREE = "SGLANG_DFLASH_WIDTH", "SGLANG_DFLASH_TREE"
POLICIES = ("adaptive", "full")


def check(device: str, tp_size: int) -> None:
    """Raises ValueError if a variable has no allowed value, or asks for what this server does not serve."""
    asked = os.environ.get(WIDTH, "")
    if asked and asked not in POLICIES:
        raise ValueError(f"{WIDTH} is {asked!r}; allowed: {', '.join(POLICIES)}.")
    reason = why_full(device, tp_size)
    if asked == "adaptive" and reason is not None:
        raise ValueError(f"Adaptive width ({WIDTH}) needs {reason}. Use full.")
    tree = os.environ.get(TREE, "")
    if tree not in ("", "0", "1"):
        raise ValueError(f"{TREE} is {tree!r}; allowed: 0 (chains), 1 (trees where they are served).")


def why_full(device: str, tp_size: int) -> str | None:
    """What a planned step needs and this server lacks, and why; None if it lacks nothing."""
    if device != "cpu":
        return f"--device cpu, not {device}, because an accelerator's graphs are captured for whole blocks"
    if tp_size > 1:
        return f"--tp-size 1, not {tp_size}, because ranks could choose different widths"
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    return None


def choose_planner(block_size: int, device: str, tp_size: int) -> Policy | None:
    """The policy that the variable names; without it, a planner if this server can plan. None: whole blocks."""
    if os.environ.get(WIDTH) == "full" or why_full(device, tp_size) is not None:
        return None
    return Planner(block_size)


def trees_wanted() -> bool:
    return os.environ.get(TREE) != "0"

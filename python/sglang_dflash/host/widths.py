"""Chooses the policy that plans the rows of each step."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.runtime_context import get_schedule

from sglang_dflash.core.copying import Copying
from sglang_dflash.core.plan import Planner
from sglang_dflash.core.policy import Fixed, Policy
from sglang_dflash.host import simulated
from sglang_dflash.host.shared_plan import SharedPlan

WIDTH, TREE, COPY = "SGLANG_DFLASH_WIDTH", "SGLANG_DFLASH_TREE", "SGLANG_DFLASH_COPY"
POLICIES = ("adaptive", "full")
LONGEST_COPY = 63
"""Most tokens of a copy. The slots that a request has in reserve seldom allow as many."""


def check(device: str, block_size: int) -> None:
    """Raises ValueError if a variable has no allowed value, or asks for what this server does not serve."""
    asked = os.environ.get(WIDTH, "")
    rows = _rows(asked)
    if asked and asked not in POLICIES and (rows is None or not 1 <= rows <= block_size):
        raise ValueError(f"{WIDTH} is {asked!r}; allowed: {', '.join(POLICIES)}, or a number from 1 to {block_size}.")
    reason = why_full(device)
    if asked and asked != "full" and reason is not None and not packs_rows(device):
        raise ValueError(f"{WIDTH}={asked} needs {reason}. {_allowed(device)}")
    tree = os.environ.get(TREE, "")
    if tree not in ("", "0", "1") and tree_rows() is None:
        more = "or a number of rows from 2 (that many for every request)"
        raise ValueError(f"{TREE} is {tree!r}; allowed: 0 (chains), 1 (trees where rows are planned), {more}.")
    copy = os.environ.get(COPY, "")
    if copy not in ("", "0", "1"):
        raise ValueError(f"{COPY} is {copy!r}; allowed: 0 (no copies, the default), 1 (copies where they are served).")


def _allowed(device: str) -> str:
    return "Use full, or adaptive." if device == "cuda" else "Use full."


def _rows(asked: str) -> int | None:
    """Rows of every request, where the variable is a number."""
    return int(asked) if asked.isascii() and asked.isdigit() else None


def packs_rows(device: str) -> bool:
    """Whether steps on CUDA verify the likeliest rows of all blocks."""
    return device == "cuda" and os.environ.get(WIDTH) == "adaptive"


def why_full(device: str) -> str | None:
    """What a planned step needs and this server lacks, and why; None if it lacks nothing."""
    if device != "cpu":
        return f"--device cpu, not {device}, because an accelerator's graphs are captured for whole blocks"
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    return None


def choose_planner(block_size: int, device: str, tp_group: Any, copying: Copying | None = None) -> Policy | None:
    """The policy that the variable names; without it, a planner if this server can plan. None: whole blocks.

    tp_group: the host's `GroupCoordinator` of the ranks of `--tp-size`.
    """
    asked = os.environ.get(WIDTH, "")
    if asked == "full" or why_full(device) is not None:
        return None
    rows = _rows(asked)
    policy: Policy
    if rows is None or (rows == 1 and copying is not None):
        policy = Planner(block_size, copying=copying, drafts=rows is None)
    else:
        policy = Fixed(rows)
    if tp_group.world_size == 1:
        return policy
    longest_copy = 0 if policy.copying is None else policy.copying.most
    return SharedPlan(policy, max(block_size, 1 + longest_copy), tp_group)


def choose_copying(block_size: int, vocab_size: int, keeps_states: bool = False) -> Copying | None:
    """What a planner copies from; None: copies are not wanted, or the host learns of the newest tokens too late.

    keeps_states: the target has a recurrent state, which is kept for the rows of a block and not for more.
    """
    if os.environ.get(COPY) != "1" or not get_schedule().disable_overlap_schedule:
        return None
    return Copying(block_size - 1 if keeps_states else LONGEST_COPY, vocab_size)


def tree_rows() -> int | None:
    """Rows of every request's tree, where the variable is a number above 1."""
    rows = _rows(os.environ.get(TREE, ""))
    return rows if rows is not None and rows > 1 else None


def trees_wanted() -> bool:
    return os.environ.get(TREE) != "0"

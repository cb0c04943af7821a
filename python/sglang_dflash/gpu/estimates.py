"""How long things take on a GPU. Starts, cells, profiles, checks and the first four ops are measured, on an H100 or an
H200; the other ops are guesses.

Standard library only.
"""

from __future__ import annotations

TOGETHER_S = 170.0  # the start of all servers of a stage at once; without the built-in, with compile caches, 60
CELL_S = 8.0  # one load of a sweep
PROFILE_S = 5.0  # one load of a profile
CHECK_S = 200.0  # a check: two server starts and their requests
STEP_LOADS = (1, 8, 32)  # requests at once in a sweep of step times
STEP_REPEATS = 3
ROW_LOADS = (16, 64)
ROW_REPEATS = 2
GROW_S = 25.0  # writing a grown pair
PROFILE_LOADS = (1, 8)
SMOKE_LOADS = (1, 8)
OPS_S = {
    "block_layout": 3.0,
    "acceptance": 3.0,
    "accept_chain": 2.0,
    "context_kv": 2.0,
    "toy_step": 90.0,
    "eager_launches": 60.0,
    "acceptance_sweep": 60.0,
}
"""Stage of gpu.ops -> seconds, in running order."""


def seconds(stage: str, arms: int) -> float:
    """Estimate of one stage of gpu.ops or gpu-check that serves this many arms."""
    if stage in OPS_S:
        return OPS_S[stage]
    if stage.startswith("equality-"):
        return CHECK_S
    if stage.startswith("profile-"):
        return TOGETHER_S + arms * len(PROFILE_LOADS) * PROFILE_S
    if stage.startswith("rows-"):
        return GROW_S + TOGETHER_S + 3 * len(ROW_LOADS) * ROW_REPEATS * 2 * CELL_S
    cells = len(SMOKE_LOADS) if stage == "smoke" else len(STEP_LOADS) * STEP_REPEATS
    return TOGETHER_S + arms * cells * CELL_S

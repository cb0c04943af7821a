"""How many rows a server's steps verify, as its variable asks, and what its device allows."""

from __future__ import annotations

import logging
import os

from sglang_dflash.host import simulated

logger = logging.getLogger(__name__)
WIDTH = "SGLANG_DFLASH_WIDTH"
AUTO, FULL = "auto", "full"
GONE = {
    "SGLANG_DFLASH_TURN_MS": "each decode step is a turn of the scheduler",
    "SGLANG_DFLASH_TREE": "the rows of a request are a chain",
    "SGLANG_DFLASH_COPY": "nothing is copied",
}
"""Variables that earlier versions read, and what holds now."""


def asked(device: str) -> str | int:
    """`auto`, `full`, or the number of rows of every request; without the variable, the device's default."""
    value = os.environ.get(WIDTH) or (AUTO if _why_full(device) is None and device == "cpu" else FULL)
    if value == "adaptive":  # its name in earlier versions
        return AUTO
    return int(value) if value.isascii() and value.isdigit() else value


def check(device: str, block_size: int) -> None:
    """Raises ValueError if a variable has no allowed value, or asks for what this server does not serve."""
    for variable, now in GONE.items():
        if variable in os.environ:
            raise ValueError(f"{variable} is {os.environ[variable]!r}, but it is gone: {now}. Unset it.")
    value = asked(device)
    in_range = isinstance(value, int) and 1 <= value <= block_size
    if value not in (AUTO, FULL) and not in_range:
        raise ValueError(
            f"{WIDTH} is {os.environ[WIDTH]!r}; allowed: {AUTO}, {FULL}, or a number from 1 to {block_size}."
        )
    reason = _why_full(device)
    if value != FULL and reason is not None and not trims_on_device(device):
        others = f"Use {FULL}, or {AUTO}." if device == "cuda" else f"Use {FULL}."
        raise ValueError(f"{WIDTH}={os.environ[WIDTH]} needs {reason}. {others}")
    if os.environ.get(WIDTH) == "adaptive":
        logger.warning("%s=adaptive is called %s now.", WIDTH, AUTO)


def trims_on_device(device: str) -> bool:
    """Whether steps on CUDA verify the likeliest rows of all blocks."""
    return device == "cuda" and asked(device) == AUTO


def _why_full(device: str) -> str | None:
    """What other rows than whole blocks need and this server lacks, and why; None if it lacks nothing."""
    if device != "cpu":
        return f"--device cpu, not {device}, because an accelerator's graphs are captured for whole blocks"
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    return None

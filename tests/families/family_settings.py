"""The settings under which families are served in tests, and the flags of their servers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from models import FAMILIES

from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING

REPLAYED = Path(__file__).parent / "plugins"
EVERY_WIDTH = Path(__file__).parents[1] / "e2e" / "plugins"
CHUNK = 64  # rows after which SGLang keeps a state for the prefix cache

POOL = ["--max-total-tokens", "8192", "--max-running-requests", "8"]
SMALL_POOL = ["--max-total-tokens", "900", "--max-running-requests", "8", "--schedule-conservativeness", "0.05"]
# SGLang's own switch for tests: at each 11th forward, requests are retracted, whether or not the pool is full.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
STATES = ["--max-mamba-cache-size", "64"]
SNAPSHOTS = ["--mamba-track-interval", str(CHUNK), "--mamba-radix-cache-strategy"]


def _with_plugins(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])}


FULL = {"SGLANG_DFLASH_WIDTH": "full", **_with_plugins(REPLAYED)}
EVERY = {"SGLANG_DFLASH_WIDTH": "auto", **_with_plugins(REPLAYED, EVERY_WIDTH)}


@dataclass(frozen=True, slots=True)
class Arm:
    """Settings of a server with speculation on.

    Fields:
        flags, environment: for every family.
        recurrent: further flags for families with recurrent state.
    """

    flags: list[str]
    environment: dict[str, str]
    recurrent: list[str]


ARMS = {
    "every width": Arm(POOL, TINY_ENVIRONMENT | EVERY, STATES),
    "overlap, pages, chunks": Arm(
        [*POOL, "--page-size", "16", "--chunked-prefill-size", str(CHUNK)],
        TINY_OVERLAPPING | FULL,
        [*STATES, *SNAPSHOTS, "extra_buffer"],
    ),
    "small pool": Arm(
        SMALL_POOL,
        TINY_OVERLAPPING | EVERY | RETRACT,
        ["--max-mamba-cache-size", "44", *SNAPSHOTS, "extra_buffer_lazy"],
    ),
    "whole blocks": Arm(POOL, TINY_ENVIRONMENT | FULL, STATES),
    "overlap, every width": Arm(POOL, TINY_OVERLAPPING | EVERY, [*STATES, *SNAPSHOTS, "extra_buffer"]),
    "overlap, lazy": Arm(POOL, TINY_OVERLAPPING | FULL, [*STATES, *SNAPSHOTS, "extra_buffer_lazy"]),
    "compiled": Arm(
        [*POOL, "--chunked-prefill-size", str(CHUNK)], TINY_ENVIRONMENT | EVERY | {"SGLANG_DFLASH_COMPILE": "1"}, STATES
    ),
    "small pool, no overlap": Arm(SMALL_POOL, TINY_ENVIRONMENT | FULL | RETRACT, ["--max-mamba-cache-size", "28"]),
}


def target_flags(family: str, target: Path, flags: list[str]) -> list[str]:
    """A server of the family's tiny target, with `flags`."""
    remote = ["--trust-remote-code"] if FAMILIES[family].remote else []
    return ["--device", "cpu", "--model-path", str(target), "--dtype", "float32", *remote, *flags]

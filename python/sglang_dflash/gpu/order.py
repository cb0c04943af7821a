"""The order of a first hour on a GPU machine without a network, for the side that sends and for the machine.

Standard library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.gpu.estimates import OPS_S

CALL_S = 600  # the longest command
STOP_S = 45  # before the end of a call: servers stop, results and caches are packed
PREPARE_S = 25  # gpu-check ends by itself this long before it would be interrupted
OPS_LIMIT_S = 240  # our ops must not use up the hour

PACKAGE, SERVER, FA3, FLASHINFER = "package", "server", "fa3", "flashinfer"
WITH_SERVER = (PACKAGE, SERVER)
WITH_FA3 = (*WITH_SERVER, FA3)
WITH_FLASHINFER = (*WITH_FA3, FLASHINFER)


@dataclass(frozen=True, slots=True)
class Step:
    """Stages that run in one call.

    Fields:
        groups: groups of the bundle that must be installed.
        stages: of gpu.ops or of gpu-check, never of both.
    """

    groups: tuple[str, ...]
    stages: tuple[str, ...]

    @property
    def with_builtin(self) -> bool:
        """Whether the built-in worker can start, so that a stage without it is not done."""
        return FLASHINFER in self.groups


STEPS = (
    Step((), ("block_layout", "acceptance", "accept_chain", "context_kv")),
    Step(WITH_SERVER, ("smoke",)),
    Step(WITH_SERVER, ("equality-triton-bfloat16",)),
    Step(WITH_SERVER, ("steps-qwen3-8b-triton",)),
    Step(WITH_SERVER, ("profile-qwen3-8b",)),
    Step(WITH_FA3, ("equality-fa3-bfloat16",)),
    Step(WITH_FA3, ("steps-qwen3-8b-fa3",)),
    Step(WITH_FA3, ("equality-triton-float16",)),
    Step(WITH_FLASHINFER, ("steps-qwen3-8b-triton", "steps-qwen3-8b-fa3", "profile-qwen3-8b")),
    Step(WITH_FLASHINFER, ("equality-flashinfer-bfloat16", "smoke")),
    Step(WITH_FLASHINFER, ("rows-grown-fa3",)),
    Step(WITH_FLASHINFER, ("steps-qwen3-8b-flashinfer",)),
    Step(WITH_FLASHINFER, ("steps-llama-3.1-8b-triton", "steps-llama-3.1-8b-fa3", "steps-llama-3.1-8b-flashinfer")),
    Step((), ("toy_step", "eager_launches", "acceptance_sweep")),
)
"""The most informative first. The group triton is left out: another Triton in the middle would change what is timed."""


def unfinished(step: Step, results: Path) -> list[str]:
    """The step's stages that a folder of results lacks. A failed stage is finished: only a person runs it again."""
    return [stage for stage in step.stages if not _finished(stage, results, step.with_builtin)]


def _finished(stage: str, results: Path, with_builtin: bool) -> bool:
    file = results / ("gpu_ops.json" if stage in OPS_S else f"{stage}.json")
    if not file.exists():
        return False
    held = json.loads(file.read_text())
    if stage in OPS_S:
        return stage in held["failures"] or (stage in held["stages"] and held["running"] != stage)
    return held["state"] != "partial" and not (with_builtin and held["absent"])


def short_name(device: str) -> str:
    """The device's part of a results folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")

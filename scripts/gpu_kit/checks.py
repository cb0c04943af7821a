"""The stages of gpu_check: their names, what each does, and how one is run and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu_kit.equality_stage import equality
from gpu_kit.profile_stage import profile
from gpu_kit.results import Results, Stage
from gpu_kit.setting import Setting
from gpu_kit.sweep_stages import smoke, step_times
from sglang_dflash.serving import ServerError

BACKENDS = ("triton", "flashinfer", "fa3")
MODELS = ("qwen3-8b", "llama-3.1-8b")
PROFILED = MODELS[0]


@dataclass(frozen=True, slots=True)
class Check:
    """A stage: `run(setting, stage)` fills in the stage's rows, failures, notes and what is left."""

    name: str
    about: str
    run: Callable[[Setting, Stage], None]


def checks(backends: Sequence[str]) -> list[Check]:
    """In the order in which they are run: what tells most comes first."""
    times = [
        Check(
            f"steps-{model}-{backend}",
            f"step times of off, ours and the built-in: {model} shape, {backend}",
            partial(step_times, model=model, backend=backend),
        )
        for model in MODELS
        for backend in backends
    ]
    about_profile = f"launches, copies and waits of a step: {PROFILED} shape, {backends[0]}"
    return [
        Check("smoke", f"the embedded pair is served, tokens equal with off and the built-in: {backends[0]}", smoke),
        Check("equality", "sglang-dflash check of the embedded pair on every attention backend", equality),
        times[0],
        Check(f"profile-{PROFILED}", about_profile, partial(profile, model=PROFILED)),
        *times[1:],
    ]


def run_check(check: Check, setting: Setting, results: Results, facts: dict[str, Any]) -> Stage:
    """Goes on with a stage and keeps what comes of it, also when it is interrupted.

    Args:
        facts: commit, versions and machine of this call.

    Raises:
        ValueError: former calls were made at another commit.
    """
    stage = results.load(check.name)
    if stage.commit and stage.commit != facts["commit"]:
        raise ValueError(
            f"--output {results.folder} holds {check.name} of commit {stage.commit}, this is {facts['commit']}: name "
            "another folder."
        )
    stage.commit, stage.versions, stage.machine = facts["commit"], facts["versions"], facts["machine"]
    stage.commands.append(setting.command)
    begin = time.monotonic()
    stage.left = "interrupted"
    try:
        check.run(setting, stage)
    except (ServerError, OSError) as error:
        stage.left = ""
        stage.failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    finally:
        stage.seconds = round(stage.seconds + time.monotonic() - begin, 1)
        results.save(stage)
    return stage

"""The stages of gpu_check: their names, what each does, and how one is run and kept."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu_kit.equality_stage import equality
from gpu_kit.profile_stage import profile
from gpu_kit.results import OtherRunError, Results, Stage
from gpu_kit.setting import Setting
from gpu_kit.sweep_stages import smoke, step_times

BACKENDS = ("triton", "flashinfer", "fa3")
MODELS = ("qwen3-8b", "llama-3.1-8b")
REHEARSED_BACKENDS = ("dflash_cpu",)
REHEARSED_MODELS = ("qwen3-small", "llama-small")
REHEARSAL = "Real servers on a CPU with small shapes: a rehearsal. No number here says anything of a GPU."


@dataclass(frozen=True, slots=True)
class Check:
    """A stage: `run(setting, stage)` fills in the stage's rows, failures, notes and what is left."""

    name: str
    about: str
    run: Callable[[Setting, Stage], None]


def checks(backends: Sequence[str], models: Sequence[str] = MODELS) -> list[Check]:
    """In the order in which they are run: what tells most comes first. The first model is the one that is profiled."""
    times = [
        Check(
            f"steps-{model}-{backend}",
            f"step times of off, ours and the built-in: {model} shape, {backend}",
            partial(step_times, model=model, backend=backend),
        )
        for model in models
        for backend in backends
    ]
    about_profile = f"launches, copies and waits of a step: {models[0]} shape, {backends[0]}"
    return [
        Check("smoke", f"the embedded pair is served, tokens equal with off and the built-in: {backends[0]}", smoke),
        Check("equality", "sglang-dflash check of the embedded pair on every attention backend", equality),
        times[0],
        Check(f"profile-{models[0]}", about_profile, partial(profile, model=models[0])),
        *times[1:],
    ]


def run_check(check: Check, setting: Setting, results: Results, facts: dict[str, Any]) -> Stage:
    """Goes on with a stage and keeps what comes of it, also when it is interrupted.

    Args:
        facts: commit, versions and machine of this call.

    Raises:
        OtherRunError: former calls were made at another commit, or measured something else.
    """
    stage = results.load(check.name)
    if stage.commit and stage.commit != facts["commit"]:
        raise OtherRunError(
            f"--output {results.folder} holds {check.name} of commit {stage.commit}, this is {facts['commit']}: name "
            "another folder."
        )
    stage.commit, stage.versions, stage.machine = facts["commit"], facts["versions"], facts["machine"]
    stage.commands.append(setting.command)
    begin, left = time.monotonic(), stage.left
    try:
        check.run(setting, stage)
    except OtherRunError:
        stage.left = left
        raise
    except KeyboardInterrupt:
        stage.left = "interrupted"  # now, for a stage has none left until it finds out
        raise
    except Exception as error:  # whatever it was: the other stages still count, and a machine is lent for minutes
        traceback.print_exc()
        stage.left = ""
        stage.failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    finally:
        if setting.rehearsal and REHEARSAL not in stage.notes:
            stage.notes.insert(0, REHEARSAL)
        stage.seconds = round(stage.seconds + time.monotonic() - begin, 1)
        results.save(stage)
    return stage

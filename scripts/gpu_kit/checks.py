"""The stages of gpu_check: their names, what each does, how one runs and is saved."""

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
REHEARSAL = "A rehearsal: real servers on a CPU with small shapes. No number here is valid for a GPU."


@dataclass(frozen=True, slots=True)
class Check:
    """A stage: `run(setting, stage)` fills in `rows`, `failures`, `notes` and `left` of the stage."""

    name: str
    about: str
    run: Callable[[Setting, Stage], None]


def checks(backends: Sequence[str], models: Sequence[str] = MODELS) -> list[Check]:
    """The stages in running order, the most informative first. Only the first model is profiled."""
    times = [
        Check(
            f"steps-{model}-{backend}",
            f"step times of off, our worker and the built-in: {model} shape, {backend}",
            partial(step_times, model=model, backend=backend),
        )
        for model in models
        for backend in backends
    ]
    about_profile = f"launches, copies and waits per step: {models[0]} shape, {backends[0]}"
    return [
        Check("smoke", f"embedded pair: tokens of ours and the built-in equal off: {backends[0]}", smoke),
        Check("equality", "sglang-dflash check of the embedded pair on every attention backend", equality),
        times[0],
        Check(f"profile-{models[0]}", about_profile, partial(profile, model=models[0])),
        *times[1:],
    ]


def run_check(check: Check, setting: Setting, results: Results, facts: dict[str, Any]) -> Stage:
    """Runs or resumes a stage and saves its results, also when it is interrupted.

    Args:
        facts: commit, versions and machine of this call.

    Raises:
        OtherRunError: earlier calls ran at another commit or with other options.
    """
    stage = results.load(check.name)
    if stage.commit and stage.commit != facts["commit"]:
        raise OtherRunError(
            f"--output {results.folder} holds results of {check.name} at commit {stage.commit}, but this is "
            f"{facts['commit']}: choose another folder."
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
        stage.left = "interrupted"  # set here, because a stage clears `left` when it begins
        raise
    except Exception as error:  # any error: the other stages still run, because GPU time is scarce
        traceback.print_exc()
        stage.left = ""
        stage.failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
    finally:
        if setting.rehearsal and REHEARSAL not in stage.notes:
            stage.notes.insert(0, REHEARSAL)
        stage.seconds = round(stage.seconds + time.monotonic() - begin, 1)
        results.save(stage)
    return stage

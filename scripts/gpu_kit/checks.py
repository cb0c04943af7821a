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

BACKENDS = ("triton", "fa3", "flashinfer")
MODELS = ("qwen3-8b", "llama-3.1-8b")
REHEARSED_BACKENDS = ("dflash_cpu",)
REHEARSED_MODELS = ("qwen3-small", "llama-small")
EXACT = ("triton", "dflash_cpu")  # backends that also check float32, where rounding ties are rare
REHEARSAL = "A rehearsal: real servers on a CPU with small shapes. No number here is valid for a GPU."
CUT = "the call was killed"


@dataclass(frozen=True, slots=True)
class Check:
    """A stage: `run(setting, stage)` fills in `rows`, `failures`, `notes` and `absent` of the stage, and returns why
    another call is needed, or ""."""

    name: str
    about: str
    run: Callable[[Setting, Stage], str]


def checks(backends: Sequence[str], models: Sequence[str] = MODELS) -> list[Check]:
    """The stages in running order, the most informative first. Only the first model is profiled."""
    first = backends[0]
    about_smoke = f"embedded pair: tokens and tau of ours and the built-in beside off: {first}"
    about_profile = f"launches, copies and waits per step: {models[0]} shape, {first}"
    return [
        _equality(first, "bfloat16"),
        Check(f"profile-{models[0]}", about_profile, partial(profile, model=models[0])),
        _step_times(models[0], first),
        *(_equality(backend, "bfloat16") for backend in backends[1:]),
        *(_step_times(models[0], backend) for backend in backends[1:]),
        *(_equality(backend, "float32") for backend in backends if backend in EXACT),
        Check("smoke", about_smoke, smoke),
        *(_step_times(model, backend) for model in models[1:] for backend in backends),
    ]


def _equality(backend: str, dtype: str) -> Check:
    about = f"sglang-dflash check of the embedded pair: {backend}, {dtype}"
    return Check(f"equality-{backend}-{dtype}", about, partial(equality, backend=backend, dtype=dtype))


def _step_times(model: str, backend: str) -> Check:
    about = f"step times of off, our worker and the built-in: {model} shape, {backend}"
    return Check(f"steps-{model}-{backend}", about, partial(step_times, model=model, backend=backend))


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
    stage.left = CUT  # what the file says if this process is killed
    try:
        stage.left = check.run(setting, stage)
    except OtherRunError:
        stage.left = left
        raise
    except KeyboardInterrupt:
        stage.left = "interrupted"
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

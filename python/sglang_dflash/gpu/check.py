"""The check of our worker in SGLang on a GPU: its stages, how one runs and is saved, and one call of it."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_dflash.bench.machine import machine, versions
from sglang_dflash.gpu.budget import Budget
from sglang_dflash.gpu.equality_stage import equality
from sglang_dflash.gpu.estimates import seconds
from sglang_dflash.gpu.order import short_name
from sglang_dflash.gpu.peers import why_no_builtin
from sglang_dflash.gpu.profile_stage import profile
from sglang_dflash.gpu.results import OtherRunError, Results, Stage
from sglang_dflash.gpu.setting import Setting
from sglang_dflash.gpu.sweep_stages import rows_that_pay, smoke, step_times

BACKENDS = ("triton", "fa3", "flashinfer")
MODELS = ("qwen3-8b", "llama-3.1-8b")
REHEARSED_BACKENDS = ("dflash_cpu",)
REHEARSED_MODELS = ("qwen3-small", "llama-small")
FINE = {"triton": "float16", "dflash_cpu": "float32"}
"""Backend -> a finer dtype that it also checks: fewer tokens tie in it. SGLang's RMSNorm on CUDA takes no float32."""
PACKING = ("fa3", *REHEARSED_BACKENDS)
"""Backends on which the rows that pay can be packed; on a CPU they are planned."""
REHEARSAL = "A rehearsal: real servers on a CPU with small shapes. No number here is valid for a GPU."
CUT = "the call was killed"
REHEARSAL_FLAGS = "--device cpu --max-total-tokens 32768"


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
        Check("smoke", about_smoke, smoke),
        _equality(first, "bfloat16"),
        _step_times(models[0], first),
        Check(f"profile-{models[0]}", about_profile, partial(profile, model=models[0])),
        *(_equality(backend, "bfloat16") for backend in backends[1:]),
        *(_step_times(models[0], backend) for backend in backends[1:]),
        *(_equality(backend, FINE[backend]) for backend in backends if backend in FINE),
        *(_step_times(model, backend) for model in models[1:] for backend in backends),
        *(_rows_that_pay(backend) for backend in backends if backend in PACKING),
    ]


def _equality(backend: str, dtype: str) -> Check:
    about = f"sglang-dflash check of the embedded pair: {backend}, {dtype}"
    return Check(f"equality-{backend}-{dtype}", about, partial(equality, backend=backend, dtype=dtype))


def _step_times(model: str, backend: str) -> Check:
    about = f"step times of off, our worker and the built-in: {model} shape, {backend}"
    return Check(f"steps-{model}-{backend}", about, partial(step_times, model=model, backend=backend))


def _rows_that_pay(backend: str) -> Check:
    about = f"packed rows, whole blocks and off: the embedded pair grown to 8B, {backend}"
    return Check(f"rows-grown-{backend}", about, partial(rows_that_pay, backend=backend))


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


@dataclass(frozen=True, slots=True)
class Options:
    """What a call is asked for.

    Fields:
        rehearsal: real servers on a CPU with small shapes.
        every: all stages of these backends.
        stages: names of the stages to run; empty: all unfinished ones.
    """

    rehearsal: bool
    backends: tuple[str, ...]
    every: list[Check]
    stages: list[str]

    @classmethod
    def of(cls, device: str, backends: str | None, stages: list[str]) -> Options:
        """Reads --device, --backends and --stage.

        Raises:
            ValueError: one of them is unknown.
        """
        if device not in ("cuda", "cpu"):
            raise ValueError(f"--device {device}: choose from cuda, cpu")
        rehearsal = device == "cpu"
        allowed = REHEARSED_BACKENDS if rehearsal else BACKENDS
        chosen = tuple(dict.fromkeys(filter(None, (backends or ",".join(allowed)).split(","))))
        unknown = sorted(set(chosen) - set(allowed))
        if unknown or not chosen:
            raise ValueError(f"--backends {','.join(unknown)}: choose from {','.join(allowed)}")
        every = checks(chosen, REHEARSED_MODELS if rehearsal else MODELS)
        names = [check.name for check in every]
        for name in stages:
            if name not in names:
                raise ValueError(f"--stage {name}: choose from {', '.join(names)}")
        return cls(rehearsal, chosen, every, stages)


def run(
    options: Options,
    list_stages: bool,
    budget_s: float,
    output: Path | None,
    server_flags: str,
    commit: str,
    stand_in: Path | None,
) -> int:
    """One call: runs the stages that are not done, within the budget; prints and saves what they find.

    Returns:
        The exit code: 0 all requested stages are done, 1 a stage failed, 3 work is left.

    Raises:
        ValueError: the check cannot run here, or the folder holds other results.
    """
    every, rehearsal = options.every, options.rehearsal
    if rehearsal and not list_stages and output is None:
        raise ValueError("--device cpu is a rehearsal without valid timings: set --output for its results")
    names = [check.name for check in every]
    no_builtin = "" if rehearsal else why_no_builtin()
    if list_stages:
        _show(every, Results(output, names) if output else None, 2 if no_builtin else 3)
        return 0
    facts = _facts(commit, rehearsal, stand_in)
    folder = output or Path("docs", "gpu", f"{facts['device']}-{facts['commit']}")
    results = Results(folder.resolve(), names)
    chosen = [
        c for c in every if (c.name in options.stages if options.stages else not _played(results, c.name, no_builtin))
    ]
    setting = Setting(
        raw=results.folder / "raw",
        models=Path(tempfile.gettempdir()) / "sglang-dflash-dummies",
        budget=Budget(budget_s),
        screen=Console(stderr=True, highlight=False, markup=False),
        backends=options.backends,
        server_flags=" ".join(filter(None, [REHEARSAL_FLAGS if rehearsal else "", server_flags])),
        stand_in=stand_in.resolve() if stand_in else None,
        command=shlex.join(["sglang-dflash", *sys.argv[1:]]),
        keep=results.save,
        no_builtin=no_builtin,
        rehearsal=rehearsal,
    )
    for number, check in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {check.name}: {check.about}", flush=True)
        stage = run_check(check, setting, results, facts)
        words = [stage.state, f"{len(stage.rows)} cells", *(f"FAILED {one}" for one in stage.failures), stage.left]
        print("  " + "; ".join(filter(None, words)), flush=True)
        if stage.left:
            break
    asked = chosen if options.stages else every
    states = {check.name: results.load(check.name).state for check in asked}
    print(json.dumps({"output": str(results.folder), "stages": states}))
    return 3 if "partial" in states.values() else 1 if "failed" in states.values() else 0


def _facts(commit: str, rehearsal: bool, stand_in: Path | None) -> dict[str, Any]:
    """Commit, versions, machine, and the device's short name.

    Raises:
        ValueError: our plugin is not installed, the commit is unknown, or no GPU was found.
    """
    plugins = {point.name for point in entry_points(group="sglang.srt.plugins")}
    if not stand_in and "sglang_dflash" not in plugins:
        raise ValueError("SGLang cannot find our plugin: install this package (see docs/gpu.md).")
    found = {"versions": versions(""), "machine": machine()}
    commit = commit or found["versions"].get("commit", "")
    if not commit:
        raise ValueError("This package does not lie in a git checkout: name its commit with --commit.")
    found["versions"]["commit"] = commit  # the checkout may be a copy whose own git says another
    return found | {"commit": commit, "device": "rehearsal" if stand_in or rehearsal else _device()}


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("No GPU was found. --device cpu --output DIR runs all stages with real servers on the CPU.")
    return short_name(torch.cuda.get_device_name(0))


def _show(every: list[Check], results: Results | None, arms: int) -> None:
    for check in every:
        stage = results.load(check.name) if results else None
        state = "" if stage is None else f"{stage.state if stage.commands else 'not begun':11}"
        print(f"{check.name:30} about {seconds(check.name, arms):3.0f} s  {state}{check.about}")


def _played(results: Results, name: str, no_builtin: str) -> bool:
    """Whether the stage ran to its end, with every arm that can start here. A failed stage runs again only if --stage
    names it."""
    stage = results.load(name)
    return stage.state != "partial" and (bool(no_builtin) or not stage.absent)

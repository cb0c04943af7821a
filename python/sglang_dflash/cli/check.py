"""`sglang-dflash check`: checks on your own models that speculation changes no answer."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from sglang_dflash.checking.arms import Arm
from sglang_dflash.checking.cases import select
from sglang_dflash.checking.progress import Watch
from sglang_dflash.checking.prompts import bundled_prompts, read_prompts
from sglang_dflash.checking.recording import Recording
from sglang_dflash.checking.report import Report
from sglang_dflash.checking.run import Plan
from sglang_dflash.checking.run import check as run_check
from sglang_dflash.checking.terminal import show
from sglang_dflash.serving import TINY_DRAFT, TINY_ENVIRONMENT, TINY_TARGET, ServerError

TINY_FLAGS = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "16"]
_MODELS, _ASKED, _JUDGED, _KEPT = "Models and servers", "Prompts and parameters", "Comparison", "Files"


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def check(
    server_flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SERVER_FLAGS",
            help="After --: flags of sglang.launch_server for both servers; the baseline gets no --speculative-* flag.",
        ),
    ] = None,
    model_path: Annotated[
        str | None, _option(_MODELS, "Target: folder or hub name. Default: the embedded tiny pair.")
    ] = None,
    draft: Annotated[str | None, _option(_MODELS, "The target's DFlash draft: folder or hub name.")] = None,
    base_url: Annotated[
        list[str] | None,
        _option(
            _MODELS,
            "URL of a running server; give the baseline, then the speculating one. With --off-from: only the latter.",
        ),
    ] = None,
    flush: Annotated[
        bool, _option(_MODELS, "With --base-url: allow the check to empty the radix cache.", "--flush")
    ] = False,
    prompts: Annotated[
        Path | None,
        _option(
            _ASKED,
            "JSONL file; each row has text, messages or input_ids, and optionally an id. Default: bundled prompts.",
        ),
    ] = None,
    num_prompts: Annotated[int, _option(_ASKED, "Maximum number of prompts per case.")] = 12,
    max_new_tokens: Annotated[int, _option(_ASKED, "Maximum tokens per answer.")] = 64,
    concurrency: Annotated[
        int, _option(_ASKED, "Requests in flight in the second pass; the first pass sends one at a time.")
    ] = 8,
    cases: Annotated[
        str | None, _option(_ASKED, "Case names, separated by commas; `plain` is always asked. Default: all.")
    ] = None,
    seed: Annotated[int, _option(_ASKED, "Seed of the random parameters.")] = 0,
    tie_ulps: Annotated[
        float | None,
        _option(
            _JUDGED,
            "Two tokens tie if their logits differ by at most this many units in the last place (of numbers 16 to 32). "
            "Default: 8 in float32, else 4.",
        ),
    ] = None,
    control: Annotated[
        bool,
        _option(
            _JUDGED,
            "Also send the baseline several requests at a time, to show the ties without speculation.",
            "--control",
        ),
    ] = False,
    reference: Annotated[
        bool,
        _option(_JUDGED, "Also compare the number of verify steps with our reference in transformers.", "--reference"),
    ] = False,
    save_off: Annotated[Path | None, _option(_KEPT, "Save the baseline's answers to this file.")] = None,
    off_from: Annotated[
        Path | None, _option(_KEPT, "Use the baseline's answers from a file that --save-off wrote.")
    ] = None,
    json_file: Annotated[Path | None, _option(_KEPT, "Write the whole report to this file.", "--json")] = None,
    logs: Annotated[Path | None, _option(_KEPT, "Folder for the servers' logs. Default: a temporary folder.")] = None,
) -> None:
    """Prove on your own models that DFLASH gives the same answers as plain decoding.

    The baseline, a server with speculation off, gets every prompt with many
    sampling parameters, one request at a time. A server with speculation on
    gets the same requests, one at a time and then several at a time. The
    answers are compared token by token, and the acceptance is shown. The
    command starts both servers in turn, unless --base-url is given.

    The last line on standard output is JSON. Exit codes: 0 lossless,
    1 not lossless, 2 the check could not run, 130 interrupted.
    """

    def plan() -> Plan:
        _check_numbers(num_prompts, max_new_tokens, concurrency, tie_ulps)
        off, on = _arms(model_path, draft, base_url or [], flush, server_flags or [], off_from, logs)
        return Plan(
            off=off,
            on=on,
            prompts=read_prompts(prompts, num_prompts) if prompts else bundled_prompts(num_prompts),
            cases=None if cases is None else select(cases),
            num_prompts=num_prompts,
            limit=max_new_tokens,
            concurrency=concurrency,
            seed=seed,
            tie_ulps=tie_ulps,
            control=control,
            reference=reference,
            save_off=save_off,
        )

    raise typer.Exit(_run(plan, json_file))


def _run(plan: Callable[[], Plan], json_file: Path | None) -> int:
    """Runs a check and returns the exit code; an error is printed as one sentence."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = run_check(plan(), Watch(Console(stderr=True, highlight=False)))
        _print(report, json_file)
    except (ValueError, OSError, ServerError, httpx.HTTPError) as error:
        if os.environ.get("SGLANG_DFLASH_TRACEBACK"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; no server of ours was left running", file=sys.stderr)
        return 130
    return 0 if report.lossless else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _check_numbers(num_prompts: int, max_new_tokens: int, concurrency: int, tie_ulps: float | None) -> None:
    for name, value, least in (
        ("--num-prompts", num_prompts, 1),
        ("--max-new-tokens", max_new_tokens, 4),
        ("--concurrency", concurrency, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}.")
    if tie_ulps is not None and tie_ulps < 0:
        raise ValueError(f"--tie-ulps is {tie_ulps}; it must be 0 or more.")


def _arms(
    model_path: str | None,
    draft: str | None,
    base_url: list[str],
    flush: bool,
    server_flags: list[str],
    off_from: Path | None,
    logs: Path | None,
) -> tuple[Arm | Recording, Arm]:
    """The off arm (or the recording of its answers), and the on arm."""
    recording = Recording.load(off_from) if off_from is not None else None
    folder = logs or Path(tempfile.mkdtemp(prefix="sglang-dflash-check-"))
    if base_url:
        needed = 1 if recording is not None else 2
        if len(base_url) != needed or model_path or draft or server_flags:
            raise ValueError(
                f"--base-url is given {len(base_url)} times; it must be given twice, or once with --off-from, and "
                "without --model-path, --draft and server flags."
            )
        off, on = (
            Arm(name, None, url.rstrip("/"), folder, {}, flush)
            for name, url in (("off", base_url[0]), ("on", base_url[-1]))
        )
        return recording or off, on
    if (model_path is None) != (draft is None):
        raise ValueError("--model-path and --draft belong together: give both, or neither for the embedded pair.")
    base, environment = _server_arguments(model_path)
    ours, speculative = _split(server_flags)
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft or str(TINY_DRAFT)]
    alone = [] if "--disable-overlap-schedule" in ours else ["--disable-overlap-schedule"]
    device = [] if model_path is None or "--device" in ours else _device()
    off = Arm("off", [*base, *device, *ours, *alone], "", folder / "off.log", environment, True)
    on = Arm("on", [*base, *device, *ours, *speculate, *speculative], "", folder / "on.log", environment, True)
    return recording or off, on


def _server_arguments(model_path: str | None) -> tuple[list[str], dict[str, str]]:
    if model_path is None:
        return ["--model-path", str(TINY_TARGET), *TINY_FLAGS], TINY_ENVIRONMENT
    return ["--model-path", model_path], {}


def _device() -> list[str]:
    import torch

    return [] if torch.cuda.is_available() else ["--device", "cpu"]


def _split(flags: list[str]) -> tuple[list[str], list[str]]:
    """Splits flags into those for both arms and the --speculative-* ones, which only the on arm gets."""
    both: list[str] = []
    speculative: list[str] = []
    current = both
    for word in flags:
        if word.startswith("--"):
            current = speculative if word.startswith("--speculative") else both
        current.append(word)
    return both, speculative


def _print(report: Report, json_file: Path | None) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # not a terminal: wide lines are fine
    show(report, console)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.to_json(whole=True), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report.to_json(whole=False)))

"""`sglang-dflash check`: checks on your own models that speculation changes no answer."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_dflash.checking.cases import select
from sglang_dflash.checking.recording import Recording
from sglang_dflash.checking.report import Report
from sglang_dflash.checking.run import Plan
from sglang_dflash.checking.run import check as run_check
from sglang_dflash.checking.terminal import show
from sglang_dflash.cli.output import console_for, put_json
from sglang_dflash.doctor.card import read_card
from sglang_dflash.doctor.expected import sentence_of_check
from sglang_dflash.serving import TINY_DRAFT, TINY_ENVIRONMENT, TINY_TARGET, Arm, Progress
from sglang_dflash.serving.device import device_flags, tiny_flags
from sglang_dflash.serving.prompts import bundled_prompts, read_prompts

# A server that ends at its first leaked slot says less than one that goes on: we count the slots ourselves.
ENVIRONMENT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}
_models = partial(typer.Option, rich_help_panel="Models and servers")
_asked = partial(typer.Option, rich_help_panel="Prompts and parameters")
_judged = partial(typer.Option, rich_help_panel="Comparison")
_kept = partial(typer.Option, rich_help_panel="Files")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of `sglang-dflash check --help`."""

    server_flags: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="SERVER_FLAGS",
            help="After --: flags of sglang.launch_server for both servers; the baseline gets no --speculative-* flag.",
        ),
    ] = ()
    model_path: Annotated[str | None, _models(help="Target: folder or hub name. Default: the embedded tiny pair.")] = (
        None
    )
    draft: Annotated[str | None, _models(help="The target's DFlash draft: folder or hub name.")] = None
    base_url: Annotated[
        tuple[str, ...],
        _models(
            help="URL of a running server; give the baseline, then the speculating one. With --off-from: only the "
            "latter."
        ),
    ] = ()
    flush: Annotated[bool, _models("--flush", help="With --base-url: allow the check to empty the radix cache.")] = (
        False
    )
    prompts: Annotated[
        Path | None,
        _asked(
            help="JSONL file; each row has prompt, text, messages, turns (the first is asked) or input_ids, and "
            "optionally system and id. Default: bundled prompts."
        ),
    ] = None
    num_prompts: Annotated[int, _asked(help="Maximum number of prompts per case.")] = 12
    max_new_tokens: Annotated[int, _asked(help="Maximum tokens per answer.")] = 64
    concurrency: Annotated[
        int, _asked(help="Requests in flight in the second pass; the first pass sends one at a time.")
    ] = 8
    cases: Annotated[
        str | None, _asked(help="Case names, separated by commas; `plain` is always asked. Default: all.")
    ] = None
    seed: Annotated[int, _asked(help="Seed of the random parameters.")] = 0
    tie_ulps: Annotated[
        float | None,
        _judged(
            help="Two tokens tie if their logits differ by at most this many units in the last place (of numbers 16 to "
            "32). Default: 8 in float32, else 4."
        ),
    ] = None
    control: Annotated[
        bool,
        _judged(
            "--control",
            help="Also send the baseline several requests at a time, to show the ties without speculation.",
        ),
    ] = False
    reference: Annotated[
        bool,
        _judged("--reference", help="Also compare the number of verify steps with our reference in transformers."),
    ] = False
    save_off: Annotated[Path | None, _kept(help="Save the baseline's answers to this file.")] = None
    off_from: Annotated[Path | None, _kept(help="Use the baseline's answers from a file that --save-off wrote.")] = None
    json_file: Annotated[
        Path | None, _kept("--json", help="Write the whole report to this file; - is standard output.")
    ] = None
    logs: Annotated[Path | None, _kept(help="Folder for the servers' logs. Default: a temporary folder.")] = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value is not allowed.
        """
        for name, value, least in (
            ("--num-prompts", self.num_prompts, 1),
            ("--max-new-tokens", self.max_new_tokens, 4),
            ("--concurrency", self.concurrency, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}.")
        if self.tie_ulps is not None and self.tie_ulps < 0:
            raise ValueError(f"--tie-ulps is {self.tie_ulps}; it must be 0 or more.")


def check(options: CheckOptions) -> int:
    """Prove on your own models that DFLASH gives the same answers as plain decoding.

    The baseline, a server with speculation off, gets every prompt with many
    sampling parameters, one request at a time. A server with speculation on
    gets the same requests, one at a time and then several at a time. The
    answers are compared token by token, and the acceptance is shown. The
    command starts both servers in turn, unless --base-url is given.

    The last line on standard output is JSON. Exit codes: 0 lossless,
    1 not lossless, 2 the check could not run, 130 Ctrl-C, 143 SIGTERM.
    """
    report = run_check(_plan(options), Progress(Console(stderr=True, highlight=False)))
    ask_the_card(report)
    _print(report, options.json_file)
    return 0 if report.lossless else 1


def _plan(options: CheckOptions) -> Plan:
    off, on = arms_of(options)
    file, most = options.prompts, options.num_prompts
    return Plan(
        off=off,
        on=on,
        prompts=read_prompts(file, "--prompts", most) if file else bundled_prompts()[:most],
        cases=None if options.cases is None else select(options.cases),
        num_prompts=most,
        limit=options.max_new_tokens,
        concurrency=options.concurrency,
        seed=options.seed,
        tie_ulps=options.tie_ulps,
        control=options.control,
        reference=options.reference,
        save_off=options.save_off,
        logs=options.logs or Path(tempfile.mkdtemp(prefix="sglang-dflash-check-")),
    )


def arms_of(options: CheckOptions) -> tuple[Arm | Recording, Arm]:
    """The off arm (or the recording of its answers), and the on arm."""
    recording = Recording.load(options.off_from) if options.off_from is not None else None
    urls, target, draft, flags = options.base_url, options.model_path, options.draft, options.server_flags
    if urls:
        needed = 1 if recording is not None else 2
        if len(urls) != needed or target or draft or flags:
            raise ValueError(
                f"--base-url is given {len(urls)} times; it must be given twice, or once with --off-from, and without "
                "--model-path, --draft and server flags."
            )
        off, on = (
            Arm(name, url=url.rstrip("/"), may_flush=options.flush)
            for name, url in (("off", urls[0]), ("on", urls[-1]))
        )
        return recording or off, on
    if (target is None) != (draft is None):
        raise ValueError("--model-path and --draft belong together: give both, or neither for the embedded pair.")
    ours, speculative = _split(flags)
    base, environment = ["--model-path", target or str(TINY_TARGET), *device_flags(ours)], ENVIRONMENT
    if target is None:
        base += [*tiny_flags(16384), "--max-running-requests", "16"]
        environment = {**ENVIRONMENT, **TINY_ENVIRONMENT}
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft or str(TINY_DRAFT)]
    alone = [] if "--disable-overlap-schedule" in ours else ["--disable-overlap-schedule"]
    off = Arm("off", arguments=(*base, *ours, *alone), environment=environment)
    on = Arm("on", arguments=(*base, *ours, *speculate, *speculative), environment=environment)
    return recording or off, on


def _split(flags: Sequence[str]) -> tuple[list[str], list[str]]:
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
    show(report, console_for(json_file))
    put_json(json_file, report.to_json(whole=True), report.to_json(whole=False))


def ask_the_card(report: Report) -> None:
    """Adds doctor's sentence where tau is far below the card of the draft, if its folder is here."""
    plain = report.plain
    if plain is not None and plain.acceptance.steps and not plain.adapts and report.on.draft_path:
        said = sentence_of_check(plain.acceptance.tau, read_card(Path(report.on.draft_path)))
        report.warnings += [said] if said else []

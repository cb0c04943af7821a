"""`sglang-dflash doctor`: why acceptance is low, or why a server is not faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sglang_dflash.cli.output import console_for, put_json
from sglang_dflash.doctor.findings import Diagnosis, Finding, show, show_verdict
from sglang_dflash.serving import Progress

_models = partial(typer.Option, rich_help_panel="Models")
_server = partial(typer.Option, rich_help_panel="Running server")
SCHEMES = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """The options of `sglang-dflash doctor --help`."""

    words: Annotated[
        tuple[str, ...],
        typer.Argument(
            metavar="[URL] [-- SERVER_FLAGS]",
            help="URL of a running server; or, after --, the flags of sglang.launch_server that the pair would get.",
        ),
    ] = ()
    model_path: Annotated[str | None, _models(help="Target: folder or hub name.")] = None
    draft: Annotated[str | None, _models(help="The target's DFlash draft: folder or hub name.")] = None
    flags: Annotated[
        bool,
        _models(
            "--flags/--no-flags",
            help="Also ask SGLang, in a child process, what it makes of the flags; its imports take half a minute.",
        ),
    ] = True
    expect_tau: Annotated[float | None, _server(help="tau that the draft should have. Default: by its card.")] = None
    off_url: Annotated[
        str | None, _server(help="URL of the same server with speculation off, to measure the break-even tau.")
    ] = None
    prompts: Annotated[
        Path | None, _server(help="JSONL file with prompts of yours, which are asked in place of doctor's own.")
    ] = None
    max_new_tokens: Annotated[int, _server(help="Maximum tokens per answer.")] = 96
    long_tokens: Annotated[int, _server(help="Tokens of a long chat.")] = 2048
    flush: Annotated[bool, _server("--flush", help="Allow doctor to empty the radix cache first.")] = False
    seed: Annotated[int | None, _server(help="Seed of the questions. Default: other ones each time.")] = None
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the whole report to this file; - is standard output.")
    ] = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value is not allowed, or the words and flags do not belong together.
        """
        for name, value, least in (
            ("--max-new-tokens", self.max_new_tokens, 16),
            ("--long-tokens", self.long_tokens, 64),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}.")
        if self.expect_tau is not None and self.expect_tau <= 1:
            raise ValueError(f"--expect-tau is {self.expect_tau:g}; it must be above 1, the tau of no draft at all.")
        if self.url and len(self.words) > 1:
            raise ValueError(f"{self.words[1]} follows the URL; server flags are for a pair that does not run yet.")
        if (self.model_path is None) != (self.draft is None):
            raise ValueError("--model-path and --draft belong together: give both.")
        if not self.url and self.draft is None:
            raise ValueError("Give the URL of a running server, or --model-path and --draft.")

    @property
    def url(self) -> str:
        """Of the running server; "" if files and flags are examined."""
        return self.words[0].rstrip("/") if self.words and self.words[0].startswith(SCHEMES) else ""


def doctor(options: DoctorOptions) -> int:
    """Find out why acceptance is low, or why a server is not faster.

    With --model-path and --draft: examines configs, tokenizer, chat template
    and weight headers, then what SGLang makes of the server flags. No weight
    is read. With the URL of a running server: asks it some twenty questions,
    and compares tau with the draft's card, from the cache, in long chats and
    with the other thinking mode.

    Each finding is a line with PASS, SKIP, WARN or FAIL, and what to do. Exit
    codes: 0, 1 for a FAIL, 2 doctor could not run, 130 Ctrl-C, 143 SIGTERM.
    """
    console = console_for(options.json_file)
    progress = Progress(Console(stderr=True, highlight=False))
    diagnosis = _running(options, console, progress) if options.url else _offline(options, console, progress)
    show_verdict(diagnosis, console)
    whole = diagnosis.to_json()
    put_json(
        options.json_file, whole, {key: whole[key] for key in ("about", "verdict")} | {"exit": diagnosis.exit_code}
    )
    return diagnosis.exit_code


def _offline(options: DoctorOptions, console: Console, progress: Progress) -> Diagnosis:
    from sglang_dflash.doctor.files import examine, open_pair

    target, draft = options.model_path or "", options.draft or ""
    pair = open_pair(target, draft)
    found = examine(pair)
    show(found, console)
    measured: dict[str, Any] = {}
    if options.flags:
        started = list(_flags(options, pair, measured, progress))
        show(started, console)
        found += started
    return Diagnosis(f"{target} with {draft}", found, measured)


def _flags(options: DoctorOptions, pair: Any, measured: dict[str, Any], progress: Progress) -> Iterator[Finding]:
    from sglang_dflash.doctor import flags
    from sglang_dflash.doctor.files import weight_bytes

    with progress.waiting("Asking SGLang about the flags ...") as on_wait:
        start = flags.ask_sglang(flags.server_flags(pair.target.name, pair.draft.name, options.words), on_wait)
    measured["start"] = {"kind": start.kind, **start.values}
    ranks = start.values.get("tp_size", 1)
    held = weight_bytes(pair, start.values.get("dtype", ""))
    yield from flags.judge(start, None if held is None else held // ranks)


def _running(options: DoctorOptions, console: Console, progress: Progress) -> Diagnosis:
    from sglang_dflash.doctor.server import Order, examine_server

    order = Order(**{one.name: getattr(options, one.name) for one in fields(Order)})
    diagnosis = examine_server(order, progress)
    show(diagnosis.findings, console)
    if diagnosis.measured.get("kinds"):
        console.print(_table(diagnosis.measured))
    return diagnosis


def _table(measured: dict[str, Any]) -> Table:
    """tau by kind and by way of asking, and the acceptance of each draft position."""
    table = Table(Column("asked"), title="tau", title_justify="left")
    for name in ("tau", "card", "steps"):
        table.add_column(name, justify="right")
    table.add_column("draft 1, 2, ... accepted in % of steps")
    for name, one in {**measured["kinds"], **measured["ways"]}.items():
        card = "" if one["card"] is None else f"{one['card']:.2f}"
        shares = " ".join(f"{value:.0%}"[:-1] for value in one["by_position"])
        table.add_row(escape(name), f"{one['tau']:.2f}" if one["steps"] else "-", card, str(one["steps"]), shares)
    return table

"""`sglang-dflash fuzz`: random requests against a DFLASH server of the embedded pair."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_dflash.serving import Progress


@dataclass(frozen=True, slots=True)
class FuzzOptions:
    """What `sglang-dflash fuzz` sends."""

    requests: Annotated[int, typer.Option(help="Number of requests.")] = 2000
    seed: Annotated[int | None, typer.Option(help="Seed of the requests. Default: the time.")] = None
    fields: Annotated[bool, typer.Option("--fields", help="Send extreme values in every field of 15 endpoints.")] = (
        False
    )


def fuzz(options: FuzzOptions) -> int:
    """Send random requests to a DFLASH server of the embedded pair.

    The parameters are random, some requests are invalid and some are
    aborted. Answers are compared with speculation off. With --fields the
    server gets extreme values instead, and must survive.

    The last line on standard output is JSON. Exit codes: 0 nothing is
    wrong, 1 something is, 2 a server did not start or speculation off
    ended, 130 stopped by Ctrl-C.
    """
    from sglang_dflash.fuzz import requests as kinds

    run = kinds.fuzz_extremes if options.fields else kinds.fuzz
    seed = int(time.time()) if options.seed is None else options.seed
    console = Console(stderr=True, highlight=False)
    logs = Path(tempfile.mkdtemp(prefix="sglang-dflash-fuzz-"))
    console.print(f"seed {seed}, {options.requests} requests, logs in {logs}")
    report = {"seed": seed, **run(options.requests, seed, logs, Progress(console))}
    for wrong in report["complaints"]:
        console.print(wrong, markup=False, soft_wrap=True)
    print(json.dumps(report))
    return 1 if report["complaints"] else 0

"""`sglang-dflash fuzz`: random requests against a DFLASH server of the embedded pair."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_dflash.serving import ServerError


def fuzz(
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 2000,
    seed: Annotated[int | None, typer.Option(help="Seed of the requests. Default: the time.")] = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="Send extreme values in every field of 15 endpoints.")
    ] = False,
) -> None:
    """Send random requests to a DFLASH server of the embedded pair.

    The parameters are random, some requests are invalid and some are
    aborted. Answers are compared with speculation off. With --fields the
    server gets extreme values instead, and must survive.

    The last line on standard output is JSON. Exit codes: 0 nothing is
    wrong, 1 something is or Ctrl-C ended it, 2 a server did not start or
    speculation off ended.
    """
    from sglang_dflash.checking.progress import Watch
    from sglang_dflash.fuzz import requests as kinds

    run = kinds.fuzz_extremes if fields else kinds.fuzz
    seed = int(time.time()) if seed is None else seed
    console = Console(stderr=True, highlight=False)
    logs = Path(tempfile.mkdtemp(prefix="sglang-dflash-fuzz-"))
    console.print(f"seed {seed}, {requests} requests, logs in {logs}")
    try:
        report = {"seed": seed, **run(requests, seed, logs, Watch(console))}
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        sys.exit("stopped; no server was left running")
    for wrong in report["complaints"]:
        console.print(wrong, markup=False, soft_wrap=True)
    print(json.dumps(report))
    raise typer.Exit(1 if report["complaints"] else 0)

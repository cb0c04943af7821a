"""The command of scripts/fuzz.sh."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fuzz.fields import fuzz_extremes
from fuzz.requests import fuzz
from sglang_dflash.serving import Progress, exit_code


def main(
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 2000,
    seed: Annotated[int | None, typer.Option(help="Seed of the requests. Default: the time.")] = None,
    fields: Annotated[bool, typer.Option("--fields", help="Send extreme values in every field of 19 endpoints.")] = (
        False
    ),
) -> None:
    """Send random requests to a DFLASH server of the embedded pair.

    The parameters are random, some requests are invalid and some are aborted. Answers are compared with speculation
    off. With --fields the server gets extreme values instead, and must survive.

    The last line on standard output is JSON. Exit codes: 0 nothing is wrong, 1 something is, 2 a server did not start
    or speculation off ended, 130 stopped by Ctrl-C, 143 by SIGTERM.
    """

    def run() -> int:
        chosen = int(time.time()) if seed is None else seed
        console = Console(stderr=True, highlight=False)
        logs = Path(tempfile.mkdtemp(prefix="sglang-dflash-fuzz-"))
        console.print(f"seed {chosen}, {requests} requests, logs in {logs}")
        report = (fuzz_extremes if fields else fuzz)(requests, chosen, logs, Progress(console))
        for wrong in report["complaints"]:
            console.print(wrong, markup=False, soft_wrap=True)
        print(json.dumps({"seed": chosen, "requests": requests, **report}))
        return 1 if report["complaints"] else 0

    raise typer.Exit(exit_code(run, 2))


typer.run(main)

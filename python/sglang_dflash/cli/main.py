"""The commands of `sglang-dflash`, and how their errors reach the user: one sentence, no traceback."""

from __future__ import annotations

import os
import sys

import typer

from sglang_dflash import __version__
from sglang_dflash.cli.bench import PASSED_ON, bench
from sglang_dflash.cli.check import check
from sglang_dflash.cli.fuzz import fuzz
from sglang_dflash.cli.gpu_check import gpu_check
from sglang_dflash.cli.quickstart import quickstart
from sglang_dflash.cli.regenerate import regenerate
from sglang_dflash.cli.train import train
from sglang_dflash.serving import ServerError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(quickstart)
app.command()(check)
app.command(context_settings=PASSED_ON, add_help_option=False)(bench)
app.command()(train)
app.command()(regenerate)
app.command()(fuzz)
app.command()(gpu_check)


@app.callback(invoke_without_command=True)
def _root(show_version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Tools for DFlash speculative decoding in SGLang."""
    if show_version:
        print(__version__)
        raise typer.Exit


def run() -> None:
    """The console script."""
    try:
        app()
    except (ValueError, OSError, ServerError) as error:
        if os.environ.get("SGLANG_DFLASH_TRACEBACK"):
            raise
        sys.exit(f"error: {str(error).strip()}")

"""`sglang-dflash bench`: the benchmark, whose libraries are only loaded when it runs."""

from __future__ import annotations

import os
import sys

import typer

from sglang_dflash.serving import ServerError

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}  # all options are the benchmark's own


def bench(context: typer.Context) -> None:
    """Measure how fast SGLang serves with DFLASH, against speculation off and other engines."""
    from sglang_dflash.bench.command import benchmark

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command()(benchmark)
    try:
        app(context.args, prog_name="sglang-dflash bench")
    except (ValueError, OSError, ServerError) as error:
        if os.environ.get("SGLANG_DFLASH_TRACEBACK"):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from None

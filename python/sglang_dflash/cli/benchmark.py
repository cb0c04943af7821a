"""`benchmark_sglang.py`: its options, and what it says of itself."""

from __future__ import annotations

import time

import typer

from sglang_dflash.cli.benchmark_options import Options
from sglang_dflash.cli.options import command


def benchmark(options: Options) -> int:
    """Measure how fast SGLang serves with DFLASH, against speculation off and other engines.

    All arms get the same prompts, and one works at a time. Tokens are compared first: if greedy SGLang arms differ by
    more than a rounding tie, no speed is shown. Then SGLang's own client times the same requests. A cell is one arm,
    attention backend, cache setting, dataset, load and repeat.

    Without options, off and dflash serve the embedded pair, a small target and draft that come with this package.

    The last line on standard output is JSON.

    Exit code: 0 all cells measured (with --budget-s: those that began in time), 1 some cells failed or tokens differ, 2
    the benchmark could not run, 130 stopped by Ctrl-C, 143 by SIGTERM.
    """
    began_s = time.monotonic()
    from sglang_dflash.cli.benchmark_run import sweep  # loads pandas and matplotlib, which --help must not

    return sweep(options, began_s)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(command(benchmark, Options, code=2))


def run() -> None:
    """The script's entry."""
    app()

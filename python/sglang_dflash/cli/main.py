"""The commands of `sglang-dflash`, and how their errors reach the user: one sentence, no traceback."""

from __future__ import annotations

import typer

from sglang_dflash import __version__
from sglang_dflash.cli.benchmark import benchmark
from sglang_dflash.cli.benchmark_options import Options as BenchmarkOptions
from sglang_dflash.cli.check import CheckOptions, check
from sglang_dflash.cli.doctor import DoctorOptions, doctor
from sglang_dflash.cli.fetch import fetch
from sglang_dflash.cli.generate import GenerateOptions, generate
from sglang_dflash.cli.options import command
from sglang_dflash.cli.quickstart import quickstart
from sglang_dflash.cli.regenerate import RegenerateOptions, regenerate
from sglang_dflash.cli.train import AnswerOptions, train
from sglang_dflash.cli.watch import WatchOptions, watch
from sglang_dflash.training import TrainOptions

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(quickstart)
app.command()(fetch)
app.command()(command(check, CheckOptions, code=2))
app.command()(command(doctor, DoctorOptions, code=2))
app.command()(command(generate, GenerateOptions, code=2))
app.command()(command(watch, WatchOptions, code=2))
app.command("bench")(command(benchmark, BenchmarkOptions, code=2))
app.command()(command(train, TrainOptions, AnswerOptions, code=1))
app.command()(command(regenerate, RegenerateOptions, code=1))


@app.callback(invoke_without_command=True)
def _root(show_version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Tools for DFlash speculative decoding in SGLang."""
    if show_version:
        print(__version__)
        raise typer.Exit


def run() -> None:
    """The console script."""
    app()

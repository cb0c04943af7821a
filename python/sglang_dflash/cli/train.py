"""`sglang-dflash train`: trains a draft for your own target."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sglang_dflash.cli.regenerate import RegenerateOptions, regenerate
from sglang_dflash.training import TrainOptions

_data = partial(typer.Option, rich_help_panel="Target and data")


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options of `sglang-dflash train` that regenerate answers first."""

    regenerated: Annotated[
        bool, _data("--regenerate", help="First replace the answers by the target's own; starts a server for it.")
    ] = False
    max_new_tokens: Annotated[int, _data(help="With --regenerate: maximum tokens per answer.")] = 2048
    concurrency: Annotated[int, _data(help="With --regenerate: requests in flight.")] = 64
    server_args: Annotated[
        str, _data(help="With --regenerate: more flags of sglang.launch_server, as one quoted string.")
    ] = ""


def train(options: TrainOptions, answers: AnswerOptions) -> None:
    """Train a DFlash draft for your own target.

    On N devices: torchrun --nproc-per-node N -m sglang_dflash.cli train ...
    """
    if answers.regenerated:
        _check_before_asking(options)
        data = tuple(_own_answers(path, options, answers) for path in options.data)
        held_out = tuple(_own_answers(path, options, answers) for path in options.held_out_data)
        options = replace(options, data=data, held_out_data=held_out)
    from sglang_dflash.training.trainer import train as run

    run(options)


def _check_before_asking(options: TrainOptions) -> None:
    """Checks before regeneration what would otherwise end the run hours later."""
    from sglang_dflash.training.frozen import check_target
    from sglang_dflash.training.trainer import check_output

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--regenerate runs in one process; under torchrun, first run `sglang-dflash regenerate`.")
    names = [_answers_name(path) for path in (*options.data, *options.held_out_data)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"--data has files of the same name: {', '.join(names)}; with --regenerate, names must differ."
        )
    check_target(options)
    check_output(options)


def _own_answers(path: str, options: TrainOptions, answers: AnswerOptions) -> str:
    output = Path(options.output) / f"answers-{_answers_name(path)}"
    regenerate(
        RegenerateOptions(
            data=Path(path),
            output=output,
            target=options.target,
            max_new_tokens=answers.max_new_tokens,
            concurrency=answers.concurrency,
            server_args=answers.server_args,
            chat_template_kwargs=json.dumps(dict(options.chat_template_kwargs)),
        )
    )
    return str(output)


def _answers_name(path: str) -> str:
    """The name of a file's answers, which are text even if the file is gzip."""
    return Path(path).name.removesuffix(".gz")

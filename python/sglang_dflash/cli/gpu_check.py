"""`sglang-dflash gpu-check`: checks and times our worker in SGLang on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_dflash.gpu import ending
from sglang_dflash.serving import exit_code


def gpu_check(
    list_stages: Annotated[
        bool, typer.Option("--list", help="List the stages with estimates; with --output, states, too.")
    ] = False,
    stage: Annotated[
        list[str] | None, typer.Option(help="Run only this stage; repeatable. Default: all unfinished ones.")
    ] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds for this call.")] = 540.0,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the results. Default: docs/gpu/DEVICE-COMMIT in this folder.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Attention backends, comma-separated. Default: triton,fa3,flashinfer.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: a rehearsal with small shapes.")] = "cuda",
    server_flags: Annotated[
        str, typer.Option(help="For every server, as one quoted argument: '--sampling-backend pytorch'.")
    ] = "",
    commit: Annotated[
        str, typer.Option(help="Commit of this package; needed if it does not lie in a git checkout.")
    ] = "",
    stand_in: Annotated[
        Path | None, typer.Option(help="Dry run: a script that replaces SGLang and the checker.")
    ] = None,
) -> None:
    """Check our worker in SGLang on a GPU.

    The stages compare tokens, time steps against SGLang's own worker and
    speculation off, and count the launches of a step. A call takes at most
    about --budget-s seconds: it starts nothing that it cannot finish; the
    next call resumes. The output folder gets a JSON file per stage and a
    README.md with all tables, after every cell.

    The last line on standard output is JSON. Exit codes: 0 all requested
    stages are done, 1 a stage failed, 2 the check could not run, 3 work is
    left (call again), 130 interrupted.
    """

    def main() -> int:
        from sglang_dflash.gpu.check import Options, run

        asked = Options.of(device, backends, stage or [])
        return run(asked, list_stages, budget_s, output, server_flags, commit, stand_in)

    raise typer.Exit(exit_code(lambda: ending.exit_code(main, "stopped; finished cells are saved"), 2))

"""Compares the policy of rows with every fixed width, over recorded drafts (`record`) on made-up machines.

Each kind of text is a file. The machines' times are in `worlds`. The last line is JSON.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_dflash.core.policy import SameRows
from sglang_dflash.core.rows import RowPolicy
from tools.measure.worlds import CPU, H200, K, Text, World, rate, read_texts, right_as_often

MACHINES = {"cpu": CPU, "h200": H200}
WIDTHS = (1, 2, 4, K)
console = Console(stderr=True, highlight=False)


def main(
    files: Annotated[list[Path], typer.Argument(help="Recordings, one for each kind of text.")],
    tau: Annotated[list[float], typer.Option(help="Also drafts with this mean commit_len.")] = [2.0, 4.0, 6.0],  # noqa: B006
    requests: Annotated[list[int], typer.Option(help="Requests at once.")] = [1, 4, 8, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="How often all texts are served; the first round is not counted.")] = 4,
) -> None:
    kinds: dict[str, list[Text]] = {file.stem: read_texts(file) for file in files}
    everything = list(chain.from_iterable(kinds.values()))
    kinds |= {f"tau {mean:g}": right_as_often(everything, mean) for mean in tau}
    pairs = zip(right_as_often(everything, 5.0), right_as_often(everything, 1.3), strict=True)
    kinds["mixed"] = list(chain.from_iterable(pairs))
    results = []
    for name, machine in MACHINES.items():
        table = Table(
            f"{name}: tok/s over rows", "requests", "policy", *(f"{width} rows" for width in WIDTHS), "of the best"
        )
        for kind, texts in kinds.items():
            for at_once in requests:
                world, policy = World(machine), RowPolicy(K)
                world.replay(policy, texts, at_once)
                own = rate(chain.from_iterable(world.replay(policy, texts, at_once) for _ in range(rounds - 1)))
                fixed = [rate(World(machine).replay(SameRows(width), texts, at_once)) for width in WIDTHS]
                results.append({"machine": name, "kind": kind, "requests": at_once, "policy": own, "fixed": fixed})
                best = own / max(fixed)
                table.add_row(kind, str(at_once), f"{own:.0f}", *(f"{one:.0f}" for one in fixed), f"{best:.2f}")
        console.print(table)
    shares = [result["policy"] / max(result["fixed"]) for result in results]
    print(json.dumps({"worst": min(shares), "mean": sum(shares) / len(shares), "cells": results}))


if __name__ == "__main__":
    typer.run(main)

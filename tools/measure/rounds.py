"""What the benchmarks of native ops share: options, rounds in which the arms alternate, table and JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sglang_dflash.ops import native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_parser(about: str | None, models: Iterable[str], rows: list[int]) -> argparse.ArgumentParser:
    """The options of a benchmark. The first of `models` and `rows` are the defaults."""
    names = list(models)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=names, default=names[0])
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the options and sets the threads; ends with a sentence where the native ops are missing."""
    options = parser.parse_args()
    if native.isa() is None:
        raise SystemExit(f"This benchmark needs the native ops: {native.described()}.")
    torch.set_num_threads(options.threads)
    return options


def compare(arms: Sequence[Callable[[], float]], rows: int, repeats: int) -> tuple[dict[str, Any], list[list[float]]]:
    """Times the arms in turn, the native one first and torch second, after one round that warms up.

    Args:
        arms: each runs one round and returns its seconds.

    Returns:
        Median milliseconds of both, and torch / native as median and range; and each round's seconds by arm.
    """
    rounds = [[arm() for arm in arms] for _ in range(repeats + 1)][1:]
    native_s, torch_s, *_ = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratios = [times[1] / times[0] for times in rounds]
    found = {"rows": rows, "native_ms": native_s * 1e3, "torch_ms": torch_s * 1e3}
    return found | {"ratio": statistics.median(ratios), "ratios": [min(ratios), max(ratios)]}, rounds


def cells(result: dict[str, Any]) -> list[str]:
    """The first five columns of a result."""
    low, high = result["ratios"]
    numbers = [f"{result[name]:.2f}" for name in ("native_ms", "torch_ms", "ratio")]
    return [str(result["rows"]), *numbers, f"{low:.2f}-{high:.2f}"]


def show(
    title: str,
    columns: list[str],
    lines: list[list[str]],
    options: argparse.Namespace,
    results: list[dict[str, Any]],
    **about: int,
) -> None:
    """Prints the table, whose first five columns are those of `cells`, and the JSON with `about` in it."""
    table = Table(title=title)
    for name in ("rows", "native ms", "torch ms", "ratio", "lowest-highest", *columns):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    Console(width=140).print(table)
    machine = {"isa": native.isa(), "torch": torch.__version__, "load": os.getloadavg()[0]}
    print(json.dumps(vars(options) | machine | about | {"results": results}))

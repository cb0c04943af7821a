"""Times the native experts of a mixture against their torch body, a loop over experts; values are compared first.

A round runs the experts of every layer once, each row with experts drawn anew, as a forward does. The loop's products
are our own too (`install_linear`), as in a server. Weights lie on huge pages. The two arms alternate. Prints per row
count: median milliseconds per round of each arm, the ratio with its range, and the bytes per second of the chosen
experts' weights, each counted once. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sglang_dflash.ops import huge_pages, mixture, native

MODELS = {"small": (8, 512, 32, 8, 256), "30b-a3b, 4 layers": (4, 2048, 128, 8, 768)}
"""Layers, hidden size, experts, experts per token, their inner size."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's experts: up [E, 2 * I, H] and down [E, H, I]."""

    up: torch.Tensor
    down: torch.Tensor


def round_s(body: Callable[..., Any], layers: list[Layer], x: torch.Tensor, ids: torch.Tensor) -> float:
    weights = torch.full(ids.shape[1:], 1 / ids.shape[-1])
    begin = time.perf_counter()
    for layer, chosen in zip(layers, ids, strict=True):
        body(x, layer.up, layer.down, chosen, weights, "silu")
    return time.perf_counter() - begin


def measure(layers: list[Layer], rows: int, each: int, repeats: int) -> dict[str, Any]:
    count, _, size = layers[0].up.shape
    x = torch.randn(rows, size).to(layers[0].up.dtype)
    ids = torch.rand(len(layers), rows, count).argsort(-1)[..., :each].int()  # [layers, rows, K]
    first = (x, layers[0].up, layers[0].down, ids[0], torch.full((rows, each), 1 / each), "silu")
    ours = torch.ops.sglang_dflash.experts
    expected = mixture.experts(*first)
    close = float(expected.abs().max()) * 4 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(ours(*first), expected, rtol=0, atol=close)
    pairs = [(round_s(ours, layers, x, ids), round_s(mixture.experts, layers, x, ids)) for _ in range(repeats + 1)][1:]
    native_s, torch_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [theirs / own for own, theirs in pairs]
    read = sum(len(chosen.unique()) for chosen in ids) * (layers[0].up[0].nbytes + layers[0].down[0].nbytes)
    return {
        "rows": rows,
        "native_ms": native_s * 1e3,
        "torch_ms": torch_s * 1e3,
        "gb_s": 1e-9 * read / native_s,
        "ratio": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64, 512])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args()
    if native.isa() is None:
        raise SystemExit(f"bench_cpu_experts.py needs the native ops: {native.described()}.")
    torch.set_num_threads(options.threads)
    native.install_linear()
    count, size, number, each, inner = MODELS[options.model]
    dtype = DTYPES[options.dtype]
    shapes = ((number, 2 * inner, size), (number, size, inner))
    layers = [Layer(*(torch.randn(shape).to(dtype).mul_(0.1) for shape in shapes)) for _ in range(count)]
    page = huge_pages.page_bytes()
    if page is not None:
        huge_pages.move([weight for layer in layers for weight in (layer.up, layer.down)], page)
    console = Console(width=140)
    table = Table(title=f"experts, {options.model}, {options.dtype}, {options.threads} threads, {native.isa()}")
    for name in ("rows", "native ms", "torch ms", "ratio", "lowest-highest", "GB/s"):
        table.add_column(name, justify="right")
    results = []
    for rows in options.rows:
        one = measure(layers, rows, each, options.repeats)
        results.append(one)
        low, high = one["ratios"]
        cells = [str(rows), f"{one['native_ms']:.2f}", f"{one['torch_ms']:.2f}", f"{one['ratio']:.2f}"]
        table.add_row(*cells, f"{low:.2f}-{high:.2f}", f"{one['gb_s']:.1f}")
    console.print(table)
    machine = {"isa": native.isa(), "torch": torch.__version__, "load": os.getloadavg()[0]}
    print(json.dumps(vars(options) | machine | {"results": results}))


if __name__ == "__main__":
    main()

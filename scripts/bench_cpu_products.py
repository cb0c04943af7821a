"""Times the native linear layers against torch's BLAS over all layers of a model; values are compared first.

A round multiplies the same number of rows by every weight once, so weights come from cache or memory as in a real
forward. A server does other work between two rounds, and on a shared machine other programs may then use the last-level
cache: `--pause-ms` waits as long before each round. Weights lie on huge pages as in a server
(`SGLANG_DFLASH_HUGE_PAGES=0` leaves them on small pages). The two arms alternate. Prints per row count: median
milliseconds per round of each arm, the ratio with its range, GFLOP/s, the weight bytes read per second (each weight
counted once), and the time relative to the first row count. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from sglang_dflash.ops import huge_pages, native

MODELS = {
    "tiny": [(256, 512), (256, 256), (256, 1152), (576, 256)] * 6 + [(256, 1792)],
    "0.6b": [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)] * 28,
}
"""Input and output width of each linear layer: QKV, output, gate and up, down, then the head (0.6b: without head)."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def round_s(product: Any, weights: list[torch.Tensor], inputs: dict[int, torch.Tensor], pause_s: float) -> float:
    begin = time.perf_counter() + pause_s
    while time.perf_counter() < begin:  # awake: a core that sleeps has to speed up again
        pass
    for weight in weights:
        product(inputs[weight.shape[1]], weight, None)
    return time.perf_counter() - begin


def measure(weights: list[torch.Tensor], rows: int, repeats: int, pause_s: float) -> dict[str, Any]:
    inputs = {inner: torch.randn(rows, inner).to(weights[0].dtype) for inner in {w.shape[1] for w in weights}}
    tolerance = {"rtol": 1e-3, "atol": 1e-2} if weights[0].dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.25}
    ours = torch.ops.sglang_dflash.linear
    for weight in {weight.shape: weight for weight in weights}.values():
        x = inputs[weight.shape[1]]
        torch.testing.assert_close(ours(x, weight, None), F.linear(x, weight), **tolerance)
    rest = weights, inputs, pause_s
    pairs = [(round_s(ours, *rest), round_s(F.linear, *rest)) for _ in range(repeats + 1)][1:]
    native_s, torch_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [theirs / own for own, theirs in pairs]
    numbers = sum(weight.numel() for weight in weights)
    return {
        "rows": rows,
        "native_ms": native_s * 1e3,
        "torch_ms": torch_s * 1e3,
        "gflop_s": 2e-9 * rows * numbers / native_s,
        "gb_s": 1e-9 * numbers * weights[0].element_size() / native_s,
        "ratio": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args()
    if native.isa() is None:
        raise SystemExit(f"bench_cpu_products.py needs the native ops: {native.described()}.")
    torch.set_num_threads(options.threads)
    weights = [torch.randn(columns, inner).to(DTYPES[options.dtype]) for inner, columns in MODELS[options.model]]
    page = huge_pages.page_bytes()
    moved, huge = (0, 0) if page is None else huge_pages.move(weights, page)
    console = Console(width=140)
    title = f"products of {options.model}, {options.dtype}, {options.threads} threads, {native.isa()}"
    table = Table(title=f"{title}, {huge / 1e6:.0f} of {moved / 1e6:.0f} MB on huge pages")
    base = f"over {options.rows[0]}"
    for name in ("rows", "native ms", "torch ms", "ratio", "lowest-highest", "GFLOP/s", "GB/s", base):
        table.add_column(name, justify="right")
    results = []
    for rows in options.rows:
        one = measure(weights, rows, options.repeats, options.pause_ms / 1e3)
        results.append(one)
        low, high = one["ratios"]
        cells = [str(rows), f"{one['native_ms']:.2f}", f"{one['torch_ms']:.2f}", f"{one['ratio']:.2f}"]
        cells += [f"{low:.2f}-{high:.2f}", f"{one['gflop_s']:.0f}", f"{one['gb_s']:.1f}"]
        table.add_row(*cells, f"{one['native_ms'] / results[0]['native_ms']:.2f}")
    console.print(table)
    machine = {"isa": native.isa(), "torch": torch.__version__, "load": os.getloadavg()[0], "huge_page_bytes": huge}
    print(json.dumps(vars(options) | machine | {"results": results}))


if __name__ == "__main__":
    main()

"""Times the native experts of a mixture against their torch body, a loop over experts; values are compared first.

A round runs the experts of every layer once, each row with experts drawn anew, as a forward does. The loop's products
are our own too (`install_linear`), as in a server. Weights lie on huge pages. The two arms alternate. Prints per row
count: median milliseconds per round of each arm, the ratio with its range, and the bytes per second of the chosen
experts' weights, each counted once. The last line is JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_dflash.ops import huge_pages, mixture, native
from tools.measure.rounds import DTYPES, cells, compare, make_parser, parse, show

MODELS = {"small": (8, 512, 32, 8, 256), "30b-a3b, 4 layers": (4, 2048, 128, 8, 768)}
"""Layers, hidden size, experts, experts per token, their inner size."""


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
    bodies = (ours, mixture.experts)
    found, _ = compare([partial(round_s, body, layers, x, ids) for body in bodies], rows, repeats)
    read = sum(len(chosen.unique()) for chosen in ids) * (layers[0].up[0].nbytes + layers[0].down[0].nbytes)
    return found | {"gb_s": 1e-6 * read / found["native_ms"]}


def main() -> None:
    options = parse(make_parser(__doc__, MODELS, [1, 8, 16, 64, 512]))
    native.install_linear()
    count, size, number, each, inner = MODELS[options.model]
    dtype = DTYPES[options.dtype]
    shapes = ((number, 2 * inner, size), (number, size, inner))
    layers = [Layer(*(torch.randn(shape).to(dtype).mul_(0.1) for shape in shapes)) for _ in range(count)]
    page = huge_pages.page_bytes()
    if page is not None:
        huge_pages.move([weight for layer in layers for weight in (layer.up, layer.down)], page)
    results = [measure(layers, rows, each, options.repeats) for rows in options.rows]
    title = f"experts, {options.model}, {options.dtype}, {options.threads} threads, {native.isa()}"
    show(title, ["GB/s"], [[*cells(one), f"{one['gb_s']:.1f}"] for one in results], options, results)


if __name__ == "__main__":
    main()

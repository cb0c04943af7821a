"""Times the native linear layers against torch's BLAS over all layers of a model; values are compared first.

A round multiplies the same number of rows by every weight once, so weights come from cache or memory as in a real
forward. A server does other work between two rounds, and on a shared machine other programs may then use the last-level
cache: `--pause-ms` waits as long before each round. Weights lie on huge pages as in a server
(`SGLANG_DFLASH_HUGE_PAGES=0` leaves them on small pages). The arms alternate. `--openvino` adds OpenVINO (`pip install
openvino`), as an engine that others have tuned: one compiled chain of the same products. Prints per row count: median
milliseconds per round of each arm, the ratios with their ranges, GFLOP/s, the weight bytes read per second (each weight
counted once), and the time relative to the first row count. The last line is JSON.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from sglang_dflash.ops import huge_pages, native
from tools.measure.rounds import DTYPES, cells, compare, make_parser, parse, show

MODELS = {
    "tiny": [(256, 512), (256, 256), (256, 1152), (576, 256)] * 6 + [(256, 1792)],
    "0.6b": [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)] * 28,
}
"""Input and output width of each linear layer: QKV, output, gate and up, down, then the head (0.6b: without head)."""


class OpenVino:
    """The products of `weights` as one compiled chain: each takes the first columns of the result before."""

    def __init__(self, weights: list[torch.Tensor], threads: int) -> None:
        import openvino
        from openvino import opset13 as opset

        kind = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16}[weights[0].dtype]
        first = h = opset.parameter([-1, weights[0].shape[1]], openvino.Type.f32)
        for weight in weights:
            columns = [opset.constant([n]) for n in (0, weight.shape[1], 1, 1)]
            used = h if weight is weights[0] else opset.slice(h, *columns)
            h = opset.matmul(used, opset.constant(weight.float().numpy()), False, True)
        hints = {"INFERENCE_PRECISION_HINT": kind, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        model = openvino.Model([h], [first], "products")
        self._request = openvino.Core().compile_model(model, "CPU", hints).create_infer_request()

    def round_s(self, x: torch.Tensor, pause_s: float) -> float:
        begin = wait(pause_s)
        self._request.infer([x.float().numpy()], share_inputs=True)
        return time.perf_counter() - begin


def wait(pause_s: float) -> float:
    """Returns when the pause is over, and the time then."""
    begin = time.perf_counter() + pause_s
    while time.perf_counter() < begin:  # awake: a core that sleeps has to speed up again
        pass
    return time.perf_counter()


def round_s(product: Any, weights: list[torch.Tensor], inputs: dict[int, torch.Tensor], pause_s: float) -> float:
    begin = wait(pause_s)
    for weight in weights:
        product(inputs[weight.shape[1]], weight, None)
    return time.perf_counter() - begin


def measure(
    weights: list[torch.Tensor], rows: int, repeats: int, pause_s: float, openvino: OpenVino | None
) -> dict[str, Any]:
    inputs = {inner: torch.randn(rows, inner).to(weights[0].dtype) for inner in {w.shape[1] for w in weights}}
    tolerance = {"rtol": 1e-3, "atol": 1e-2} if weights[0].dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.25}
    ours = torch.ops.sglang_dflash.linear
    for weight in {weight.shape: weight for weight in weights}.values():
        x = inputs[weight.shape[1]]
        torch.testing.assert_close(ours(x, weight, None), F.linear(x, weight), **tolerance)
    arms = [partial(round_s, body, weights, inputs, pause_s) for body in (ours, F.linear)]
    if openvino is not None:
        arms.append(partial(openvino.round_s, inputs[weights[0].shape[1]], pause_s))
    found, rounds = compare(arms, rows, repeats)
    numbers, native_s = sum(weight.numel() for weight in weights), found["native_ms"] / 1e3
    found |= {"gflop_s": 2e-9 * rows * numbers / native_s, "gb_s": 1e-9 * numbers * weights[0].itemsize / native_s}
    if openvino is not None:
        over = [times[2] / times[0] for times in rounds]
        found["openvino_ms"] = statistics.median(times[2] for times in rounds) * 1e3
        found["openvino_ratios"] = [min(over), statistics.median(over), max(over)]
    return found


def line(one: dict[str, Any], first: dict[str, Any]) -> list[str]:
    more = [f"{one['gflop_s']:.0f}", f"{one['gb_s']:.1f}", f"{one['native_ms'] / first['native_ms']:.2f}"]
    if "openvino_ms" in one:
        least, middle, most = one["openvino_ratios"]
        more += [f"{one['openvino_ms']:.2f}", f"{middle:.2f} ({least:.2f}-{most:.2f})"]
    return [*cells(one), *more]


def main() -> None:
    parser = make_parser(__doc__, MODELS, [1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--openvino", action="store_true")
    options = parse(parser)
    weights = [torch.randn(columns, inner).to(DTYPES[options.dtype]) for inner, columns in MODELS[options.model]]
    page = huge_pages.page_bytes()
    moved, huge = (0, 0) if page is None else huge_pages.move(weights, page)
    openvino = OpenVino(weights, options.threads) if options.openvino else None
    results = [measure(weights, rows, options.repeats, options.pause_ms / 1e3, openvino) for rows in options.rows]
    title = f"products of {options.model}, {options.dtype}, {options.threads} threads, {native.isa()}"
    title += f", {huge / 1e6:.0f} of {moved / 1e6:.0f} MB on huge pages"
    columns = ["GFLOP/s", "GB/s", f"over {options.rows[0]}", *(["OpenVINO ms", "ratio"] if openvino else [])]
    lines = [line(one, results[0]) for one in results]
    show(title, columns, lines, options, results, huge_page_bytes=huge)


if __name__ == "__main__":
    main()

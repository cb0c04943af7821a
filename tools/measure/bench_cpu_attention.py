"""Times the native CPU attention against our torch attention, which is used if no compiler is available.

The torch attention gathers the KV and calls SDPA. Values are compared before anything is timed. Prints medians in
microseconds per call, the KV read per second, its share of the memory bandwidth, and the ratio of the times. The
bandwidth is measured in the same run by reading a large tensor with all threads; a share above 1 means that the KV
came from the caches. `--host` adds SGLang's `torch_native` backend, which pads queries to the KV length. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sglang_dflash import ops
from tools.measure.rounds import DTYPES

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128  # Qwen3-0.6B
READ_BYTES = 1 << 30  # for the bandwidth: far more than the caches hold


def median_us(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def bandwidth_gb_s() -> float:
    """Read bandwidth of all threads together: the best of several runs, because it serves as a limit."""
    data = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(median_us(data.max, 1) for _ in range(5)) / 1e3


def host_attention(case: dict[str, Any]) -> Callable[[], torch.Tensor]:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    host = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    batch, rows, prefix = case["batch"], case["rows"], case["prefix"]
    lens = torch.full((batch,), prefix + rows)
    out = torch.empty_like(case["q"])
    common = (case["q"], out, case["k"], case["v"], case["table"], case["requests"], lens)
    options = {"scaling": HEAD_DIM**-0.5, "enable_gqa": True}
    if rows == 1:
        return lambda: host._run_sdpa_forward_decode(*common, **options, causal=False)
    lengths = (torch.full((batch,), prefix), torch.full((batch,), rows))
    return lambda: host._run_sdpa_forward_extend(*common, *lengths, **options, causal=True)


def make_case(rows: int, context: int, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """`batch` requests of `context` tokens in scattered slots; the last `rows` tokens of each are the queries."""
    generator = torch.Generator().manual_seed(0)
    size = batch * context + 1
    return {
        "q": torch.randn(batch * rows, HEADS, HEAD_DIM, generator=generator).to(dtype),
        "k": torch.randn(size, KV_HEADS, HEAD_DIM, generator=generator).to(dtype),
        "v": torch.randn(size, KV_HEADS, HEAD_DIM, generator=generator).to(dtype),
        "table": (torch.randperm(size - 1, generator=generator) + 1).view(batch, context).int(),
        "requests": torch.arange(batch),
        "batch": batch,
        "rows": rows,
        "prefix": context - rows,
    }


def bind(case: dict[str, Any], attention: ops.Attention) -> Callable[[], torch.Tensor]:
    """One layer's call; the row layout is made outside of it, because the layers of a forward share it."""
    lens = [case["prefix"]] * case["batch"], [case["rows"]] * case["batch"]
    rows = attention.lay_out(case["table"], case["requests"], *lens)
    return lambda: attention.attend(case["q"], case["k"], case["v"], rows, scaling=HEAD_DIM**-0.5, causal=True)


def measure(case: dict[str, Any], repeats: int, peak_gb_s: float, with_host: bool) -> dict[str, Any]:
    dtype = case["q"].dtype
    native = bind(case, ops.choose_kernels("cpu", dtype).attention)
    torch_body = bind(case, ops.TORCH_ATTENTION)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(native(), torch_body(), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=tolerance)
    native_us, torch_us = median_us(native, repeats), median_us(torch_body, max(3, repeats // 4))
    read = 2 * case["batch"] * (case["prefix"] + case["rows"]) * KV_HEADS * HEAD_DIM * dtype.itemsize
    gb_s = read / native_us / 1e3
    result: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "context": case["prefix"] + case["rows"],
        "batch": case["batch"],
        "rows": case["rows"],
        "native_us": round(native_us),
        "gb_s": round(gb_s, 1),
        "share": round(gb_s / peak_gb_s, 2),
        "torch_us": round(torch_us),
        "ratio": round(torch_us / native_us, 2),
    }
    if with_host:
        host = host_attention(case)
        torch.testing.assert_close(native(), host(), rtol=1e-3, atol=tolerance)
        result["host_us"] = round(median_us(host, max(3, repeats // 8)))
        result["host_ratio"] = round(result["host_us"] / native_us, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096, 8192])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16], help="1: plain decode; more: a verify block")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--host", action="store_true", help="also measure SGLang's torch_native backend")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console, results, table = Console(), [], None
    about = {"torch": torch.__version__, "threads": arguments.threads, "ops": ops.bodies()}
    with torch.inference_mode(), console.status("measuring ...") as status:
        about |= {"read_gb_s": round(bandwidth_gb_s(), 1), "load_before": os.getloadavg()[0]}
        for dtype in arguments.dtypes:
            for context in arguments.contexts:
                for batch in arguments.batches:
                    for rows in arguments.rows:
                        status.update(f"measuring {dtype}, context {context}, batch {batch}, {rows} rows ...")
                        case = make_case(rows, context, batch, DTYPES[dtype])
                        results.append(measure(case, arguments.repeats, about["read_gb_s"], arguments.host))
                        table = table or Table(*results[0])
                        table.add_row(*map(str, results[-1].values()))
    console.print(table)
    print(json.dumps(about | {"load_after": os.getloadavg()[0], "results": results}))


if __name__ == "__main__":
    main()

"""Times our CPU attention against the host's torch_native backend, on the same paged KV; values compared first.

Prints medians in microseconds per call and the ratio; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_dflash import ops

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128  # Qwen3-0.6B
CASES = [("decode", 1), ("verify", 8), ("verify", 16), ("extend", 128)]


def median_us(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def measure(kind: str, rows: int, context: int, batch: int, repeats: int) -> dict[str, object]:
    """One case: `batch` requests of `context` tokens, of which the last `rows` ask."""
    generator = torch.Generator().manual_seed(0)
    size = batch * context + 1
    k_cache = torch.randn(size, KV_HEADS, HEAD_DIM, generator=generator)
    v_cache = torch.randn(size, KV_HEADS, HEAD_DIM, generator=generator)
    q = torch.randn(batch * rows, HEADS, HEAD_DIM, generator=generator)
    req_to_token = (torch.randperm(size - 1, generator=generator) + 1).view(batch, context).int()
    requests = torch.arange(batch)
    scaling = HEAD_DIM**-0.5
    prefix = context - rows

    scratch = ops.KVScratch()

    def ours() -> torch.Tensor:
        plan = ops.PagedRows.gather(req_to_token, requests, [prefix] * batch, [rows] * batch, scratch)
        return ops.paged_attention(q, k_cache, v_cache, plan, scaling, causal=True)

    host = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    out = torch.empty_like(q)
    lens = torch.full((batch,), context)

    def theirs() -> torch.Tensor:
        common = (q, out, k_cache, v_cache, req_to_token, requests, lens)
        if rows == 1:
            return host._run_sdpa_forward_decode(*common, scaling=scaling, enable_gqa=True, causal=False)
        lengths = (torch.full((batch,), prefix), torch.full((batch,), rows))
        return host._run_sdpa_forward_extend(*common, *lengths, scaling=scaling, enable_gqa=True, causal=True)

    torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-5)
    ours_us, theirs_us = median_us(ours, repeats), median_us(theirs, max(3, repeats // 4))
    return {
        "kind": kind,
        "rows": rows,
        "context": context,
        "batch": batch,
        "ours_us": round(ours_us),
        "torch_native_us": round(theirs_us),
        "ratio": round(theirs_us / ours_us, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    console = Console()
    table = Table("kind", "rows", "context", "batch", "ours, us", "torch_native, us", "ratio")
    results = []
    with torch.inference_mode(), console.status("measuring ...") as status:
        for kind, rows in CASES:
            for context in arguments.contexts:
                for batch in arguments.batches:
                    status.update(f"measuring {kind}, {rows} rows, context {context}, batch {batch} ...")
                    results.append(measure(kind, rows, context, batch, arguments.repeats))
                    table.add_row(*map(str, results[-1].values()))
    console.print(table)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()

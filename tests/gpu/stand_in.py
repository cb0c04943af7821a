"""Stands in for SGLang's server and for `sglang-dflash check` in a dry run of gpu_check: known answers, no model.

STAND_IN_OURS=ARM says to be our worker (else dflash). STAND_IN_WRONG=ARM: that arm's greedy tokens are not the model's.
STAND_IN_LOSSY=BACKEND: the check finds a difference there. STAND_IN_SLOW=SECONDS: the check takes so long. The check
keeps its words beside its report, and fills Triton's cache.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import fake_server

TAU = 6
CHUNK = 8 * TAU  # tokens that a server sends at once: few chunks, because their number costs time
READ = "aten::_local_scalar_dense"


def made_trace(span: str, steps: int = 4) -> dict[str, Any]:
    """A made-up trace. Each step launches two kernels (one by the runtime, one by the driver) and a graph of three
    kernels, copies to the device, copies from it to pageable memory, and waits once, in `.item()`."""
    events: list[dict[str, Any]] = []
    number = iter(range(1, 10_000))

    def call(cat: str, name: str, ts: float, device: list[tuple[str, str]], dur: float = 2.0) -> None:
        args = {"correlation": next(number)}
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args})
        for kind, what in device:
            events.append({"ph": "X", "cat": kind, "name": what, "pid": 0, "tid": 7, "ts": ts + 50, "args": args})

    for step in range(steps):
        at = 1000.0 * step
        for cat in ("user_annotation", "gpu_user_annotation"):
            events.append({"ph": "X", "cat": cat, "name": span, "pid": 1, "tid": 1, "ts": at, "dur": 500.0})
        draft = {"name": "step[DRAFT bs=4]", "ts": at + 600, "dur": 90.0}
        events.append({"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, **draft})
        call("cuda_runtime", "cudaLaunchKernel", at + 10, [("kernel", "void copy_kernel<float>(int, float*)")])
        call("cuda_driver", "cuLaunchKernel", at + 10.5, [], 1.0)  # nested in the runtime's launch
        call("cuda_driver", "cuLaunchKernelEx", at + 20, [("kernel", "_accept_kernel")])
        call("cuda_runtime", "cudaGraphLaunch", at + 30, [("kernel", f"gemm_{i}") for i in range(3)])
        call("cuda_runtime", "cudaMemcpyAsync", at + 40, [("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)")])
        item = {"name": READ, "ts": at + 50, "dur": 10.0}
        events.append({"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, **item})
        call("cuda_runtime", "cudaMemcpyAsync", at + 52, [("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)")])
        call("cuda_runtime", "cudaStreamSynchronize", at + 55, [])
        events.append({"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "name": READ, "ts": at + 70, "dur": 1.0})
    return {"traceEvents": events}


class Handler(fake_server.Handler):
    aborted = threading.Event()

    def _event(self, content: dict[str, Any]) -> None:
        """Steps commit TAU tokens, or one without speculation, however many tokens a chunk has."""
        details = content.get("sglext", {}).get("spec_tokens_details")
        if details and not self.options.speculates:
            return
        if details:
            steps = details["spec_verify_ct"] * CHUNK // TAU
            details["spec_verify_ct"], details["spec_num_proposed_drafts"] = steps, steps * TAU
            details["spec_correct_drafts_histogram"] = [0] * (TAU - 1) + [steps]
        super()._event(content)

    def do_POST(self) -> None:  # noqa: N802
        if self.path not in ("/start_profile", "/abort_request", "/generate"):
            return super().do_POST()
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path == "/start_profile":
            load = body["output_dir"].rsplit("-", 1)[1]
            span = f"step[{'VERIFY' if self.options.speculates else 'DECODE'} bs={load}]"
            path = Path(body["output_dir"]) / "1-TP-0.trace.json.gz"
            path.write_bytes(gzip.compress(json.dumps(made_trace(span)).encode()))
        elif self.path == "/abort_request":
            Handler.aborted.set()
        elif "token_ids_logprob" in body:
            return self._gap(body)
        else:
            if body["sampling_params"]["max_new_tokens"] > 1000:
                Handler.aborted.wait(20)
            else:
                Handler.aborted.clear()
            meta = {"finish_reason": {"type": "length"}}
            return self._json({"text": "", "output_ids": [1], "meta_info": meta})
        self._json({})


def serve(words: list[str]) -> None:
    arm = "off"
    if "--speculative-algorithm" in words:
        arm = "builtin" if os.environ.get("SGLANG_DFLASH_WORKER") == "builtin" else "dflash"
    host, port = (words[words.index(name) + 1] for name in ("--host", "--port"))
    flags = ["--chunk", str(CHUNK), "--host", host, "--port", port]
    if os.environ.get("STAND_IN_WRONG") == arm:
        flags += ["--wrong-from", "3"]
    Handler.options = fake_server.make_parser().parse_args(flags)
    Handler.options.speculates = arm != "off"
    if arm == os.environ.get("STAND_IN_OURS", "dflash"):
        print("sglang-dflash 0 serves DFLASH: ...", flush=True)
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


def check(words: list[str]) -> None:
    report = Path(words[words.index("--json") + 1])
    report.with_name("asked.json").write_text(json.dumps(words))
    if "TRITON_CACHE_DIR" in os.environ:
        kernel = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel"
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.write_bytes(kernel.read_bytes() if kernel.exists() else os.urandom(3000))
    print("Speculation on, one at a time: 6 identical, 0 ties, 0 different, 0 refused", flush=True)
    time.sleep(float(os.environ.get("STAND_IN_SLOW", "0")))
    backend = words[words.index("--attention-backend") + 1]
    lossy = os.environ.get("STAND_IN_LOSSY") == backend
    case = {"identical": 11, "ties": 0, "different": int(lossy)}
    found = {"lossless": not lossy, "failures": ["1 of 12 requests"] if lossy else [], "requests": 12, "tokens": 500}
    report.write_text(json.dumps(found | {"cases": [case], "differences": []}))


if __name__ == "__main__":
    {"serve": serve, "check": check}[sys.argv[1]](sys.argv[2:])

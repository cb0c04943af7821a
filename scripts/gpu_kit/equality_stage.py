"""Runs `sglang-dflash check` of the embedded pair on every attention backend, one process each."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from gpu_kit.budget import MARGIN, OutOfTimeError
from gpu_kit.results import Row, Stage
from gpu_kit.setting import Setting
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET

CHECK_S = 200.0  # first estimate of a check: two servers and their requests
STOP_S = 40.0  # time for the check to stop its servers
ASKED = ["--num-prompts", "6", "--max-new-tokens", "48"]
EXACT = ("triton", "dflash_cpu")  # backends that also run float32
SERVED = ["--max-total-tokens", "32768", "--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16"]


def equality(setting: Setting, stage: Stage) -> None:
    """Checks bfloat16 on every backend, and float32, where rounding ties are rare, on the backends in EXACT."""
    cells = [(backend, "bfloat16") for backend in setting.backends]
    cells += [(backend, "float32") for backend in setting.backends if backend in EXACT]
    done = {(row["backend"], row["dtype"]) for row in stage.rows if row["lossless"] is not None}
    stage.left, stage.failures = "", []
    stage.rows = [row for row in stage.rows if (row["backend"], row["dtype"]) in done]
    for backend, dtype in cells:
        if (backend, dtype) in done:
            continue
        needed = MARGIN * max((row["seconds"] for row in stage.rows), default=CHECK_S / MARGIN)
        try:
            setting.budget.begin(f"checking {backend} in {dtype}", needed)
            stage.rows.append(_check(setting, stage.stage, backend, dtype))
            setting.budget.finished()
        except OutOfTimeError as reason:
            stage.left = str(reason)
            break
    stage.failures = [f"{row['backend']}, {row['dtype']}: {row['reason']}" for row in stage.rows if row["reason"]]


def _check(setting: Setting, stage: str, backend: str, dtype: str) -> Row:
    """
    Raises:
        OutOfTimeError: the check did not end in the time that was left; its servers are stopped.
    """
    folder = setting.raw / f"{stage}-{backend}-{dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    words = [*setting.checker(), "--model-path", str(TINY_TARGET), "--draft", str(TINY_DRAFT), *ASKED]
    words += ["--json", str(report), "--logs", str(folder), "--", "--dtype", dtype, "--attention-backend", backend]
    setting.screen.print(f"checking {backend} in {dtype} ...", style="dim")
    begin = time.monotonic()
    with (folder / "check.log").open("wb") as log:
        process = subprocess.Popen([*words, *SERVED, *setting.flags()], stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(max(1.0, setting.budget.left_s))
        except subprocess.TimeoutExpired:
            raise OutOfTimeError(f"checking {backend} in {dtype} used all the time that was left") from None
        finally:
            _end(process)
    row = _row(report, folder / "check.log") | {"seconds": round(time.monotonic() - begin, 1)}
    return {"backend": backend, "dtype": dtype} | row


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait()


def _row(report: Path, log: Path) -> Row:
    if not report.exists():
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"lossless": None, "reason": (lines or ["the check printed nothing"])[-1][:400]}
    found: dict[str, Any] = json.loads(report.read_text())
    cases = found["cases"]
    return {
        "lossless": found["lossless"],
        "requests": found["requests"],
        "tokens": found["tokens"],
        "identical": sum(case["identical"] for case in cases),
        "ties": sum(case["ties"] for case in cases),
        "different": sum(case["different"] for case in cases),
        "reason": "; ".join(found["failures"]),
        "differences": found["differences"][:20],
    }

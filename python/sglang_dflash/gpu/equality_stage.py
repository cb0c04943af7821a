"""Runs `sglang-dflash check` of the embedded pair on one attention backend in one dtype."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from sglang_dflash.gpu.budget import OutOfTimeError
from sglang_dflash.gpu.estimates import CHECK_S
from sglang_dflash.gpu.results import Row, Stage
from sglang_dflash.gpu.setting import EMBEDDED_FLAGS, Setting
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET

STOP_S = 20.0  # time for the check to stop its servers
ASKED = ["--num-prompts", "6", "--max-new-tokens", "48"]


def equality(setting: Setting, stage: Stage, backend: str, dtype: str) -> str:
    """Compares tokens with those of speculation off; returns why another call is needed, or ""."""
    stage.rows, stage.failures, stage.notes = [], [], []
    try:
        setting.budget.begin(f"checking {backend} in {dtype}", CHECK_S)
        row = _check(setting, stage.stage, backend, dtype)
    except OutOfTimeError as reason:
        stage.notes = _found_so_far(setting.raw / stage.stage / "check.log")
        return str(reason)
    setting.budget.finished()
    stage.rows = [row]
    stage.failures = [row["reason"]] if row["reason"] else []
    return ""


def _check(setting: Setting, stage: str, backend: str, dtype: str) -> Row:
    """
    Raises:
        OutOfTimeError: the check did not end in the time that was left; its servers are stopped.
    """
    folder = setting.raw / stage
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    words = [*setting.checker(), "--model-path", str(TINY_TARGET), "--draft", str(TINY_DRAFT), *ASKED]
    words += ["--json", str(report), "--logs", str(folder), "--", "--dtype", dtype, "--attention-backend", backend]
    words += [*EMBEDDED_FLAGS, *setting.flags(backend)]
    setting.screen.print(f"checking {backend} in {dtype} ...", style="dim")
    begin = time.monotonic()
    with (folder / "check.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(max(1.0, setting.budget.left_s))
        except subprocess.TimeoutExpired:
            raise OutOfTimeError(f"checking {backend} in {dtype} used all the time that was left") from None
        finally:
            _end(process)
    row = _row(report, folder / "check.log") | {"seconds": round(time.monotonic() - begin, 1)}
    return {"backend": backend, "dtype": dtype} | row


def _found_so_far(log: Path) -> list[str]:
    """What a check that was ended has said of its phases before."""
    said = log.read_text(errors="replace") if log.exists() else ""
    return [line for line in said.splitlines() if " identical, " in line]


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

"""Reads what a run is measured on: hardware, load, and software versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("sglang-dflash", "sglang", "torch", "transformers", "flashinfer-python", "sglang-kernel", "triton")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, GPUs, and the load at the start of the run."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpus": _lines(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]),
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions(vllm_python: str) -> dict[str, str]:
    """Versions of Python, of the packages that serve, of this repository (its commit), and of vLLM."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if here := commit():
        found["commit"] = here
    if vllm_python:
        # The distribution of the CPU build has another name.
        script = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
        said = _lines([vllm_python, "-c", script])
        found["vllm"] = said[-1] if said else "unknown"
    return found


def commit() -> str:
    """The commit of the folder that contains this package; "" if it is not a git checkout."""
    said = _lines(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"])
    return said[0] if said else ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), sys.platform)


def _lines(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []

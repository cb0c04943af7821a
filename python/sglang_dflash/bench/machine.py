"""Reads what a run is measured on: hardware, load, and software versions."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("sglang-dflash", "sglang", "torch", "transformers", "flashinfer-python", "sglang-kernel", "triton")
_VLLM = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"  # any build's name


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, GPUs, and the load at the start of the run."""
    cpu = _lines(["grep", "-m1", "^model name", "/proc/cpuinfo"])
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpus": _lines(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]),
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions(vllm_python: str) -> dict[str, str]:
    """Versions of Python, of the packages that serve, of this repository (its commit), and of vLLM."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    folder = str(Path(__file__).parent)
    if commit := _lines(["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"]):
        found["commit"] = commit[0]
    if vllm_python:
        found["vllm"] = (_lines([vllm_python, "-c", _VLLM]) or ["unknown"])[-1]
    return found


def _lines(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []

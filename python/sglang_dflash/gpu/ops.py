"""Checks and times our Triton ops on a GPU, before SGLang runs there.

Compares results with the reference ops, times with the memory bandwidth's limit, and measures the lowest time of a
decode step. Needs torch and Triton, no SGLang. Each stage prints a table; gpu_ops.json in the output folder gets every
row as it is measured, and keeps the stages of earlier runs at the same commit on the same machine. Exit codes: 0: all
stages passed, 1: a stage failed, 130: it was interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

from sglang_dflash.gpu.ending import exit_code
from sglang_dflash.gpu.estimates import OPS_S

STAGES = {
    "block_layout": "op_stages",
    "acceptance": "op_stages",
    "accept_chain": "op_stages",
    "context_kv": "op_stages",
    "toy_step": "toy_step",
    "eager_launches": "toy_step",
    "acceptance_sweep": "op_stages",
}
"""Stage -> its module in this folder, the most informative stages first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-ops"), help="folder of gpu_ops.json")
    parser.add_argument("--dry-run", action="store_true", help="run tiny shapes on a CPU with Triton's interpreter")
    parser.add_argument("--stages", nargs="+", help="run these stages only")
    parser.add_argument("--list", action="store_true", help="list the stages, with estimates")
    parser.add_argument("--commit", default="", help="commit of this folder, if it is not a git checkout")
    arguments = parser.parse_args()
    if arguments.list:
        for name in STAGES:
            print(f"{name:28} about {OPS_S[name]:3.0f} s")
        return 0
    chosen = arguments.stages or list(STAGES)
    unknown = sorted(set(chosen) - set(STAGES))
    if unknown:
        parser.error(f"--stages {' '.join(unknown)}: choose from {', '.join(STAGES)}")
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

    from sglang_dflash.gpu import device as devices
    from sglang_dflash.gpu.report import Report

    device = devices.pick(arguments.dry_run)
    facts = device.describe()
    bandwidth = device.bandwidth()
    facts["copy_gb_s"] = bandwidth / 1e3
    report = Report(arguments.output, facts, arguments.commit)
    print(facts, flush=True)
    for number, name in enumerate(chosen, 1):
        begin = time.perf_counter()
        print(f"[{number}/{len(chosen)}] {name}", flush=True)
        try:
            stage = getattr(importlib.import_module(f"sglang_dflash.gpu.{STAGES[name]}"), name)
            report.run(name, stage(device, bandwidth))
        except Exception as error:  # GPU time is scarce: the other stages still run
            traceback.print_exc()
            report.fail(name, f"{type(error).__name__}: {error}")
        print(f"  {time.perf_counter() - begin:.1f} s", flush=True)
    return 1 if set(chosen) & set(report.content["failures"]) else 0


if __name__ == "__main__":
    sys.exit(exit_code(main, "stopped; finished rows are saved"))

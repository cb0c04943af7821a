"""Runs on a GPU machine without a network: takes in what a call brought, installs it, runs stages, hands results back.

`gpu.hour` prints the command. The output folder gets state.json, results.tar.gz, log.txt and the compile caches
(caches-0-of-2, ...), the first three whenever a stage has measured something, because a call may be killed at any time.
Needs Python 3.12 or the bundle's, and no packages. Exit codes: 0: done, 1: a stage could not run or failed, 130: it was
interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_dflash.gpu.archive import pack_caches, pack_results, write_whole
from sglang_dflash.gpu.ending import exit_code
from sglang_dflash.gpu.estimates import OPS_S
from sglang_dflash.gpu.landing import Machine
from sglang_dflash.gpu.order import OPS_LIMIT_S, PREPARE_S, STOP_S

GRACE_S = 25  # from SIGTERM to SIGKILL: servers stop
LOOK_S = 0.5
SHOWN = 4000  # characters of the log that the call prints


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder whose files come back")
    parser.add_argument("--cargo", type=Path, required=True, help="folder that this call brought")
    parser.add_argument("--commit", required=True, help="commit of this folder")
    parser.add_argument("--limit-s", type=float, required=True, help="seconds after which this command is killed")
    parser.add_argument("--run", nargs="*", default=(), help="stages to run, of gpu.ops or of gpu-check")
    parser.add_argument("--backends", help="attention backends of gpu-check, the first also of smoke and profile")
    parser.add_argument("--needs", nargs="*", default=(), help="groups of the bundle that these stages need")
    parser.add_argument("--stand-in", type=Path, help="dry run: a script that replaces SGLang and the checker")
    return parser.parse_args()


class Call:
    """One call: what it has to say, and when it must end."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out
        self._end = time.monotonic() + arguments.limit_s - STOP_S
        self._seen: object = None
        self._log = Path(tempfile.gettempdir()) / "sglang-dflash-hour" / "call.log"
        self._machine = Machine(self._log.parent, arguments.commit)
        self._said: list[str] = []

    def go(self) -> int:
        self._out.mkdir(parents=True, exist_ok=True)
        self._log.write_text("")
        machine = self._machine
        machine.end_leftovers()
        if self._arguments.cargo.is_dir():
            self._said += machine.receive(self._arguments.cargo)
        self._hand_back()
        code = 0
        try:
            code = self._run_stages() if self._arguments.run else 0
        finally:
            machine.start_installer()
            self._hand_back()
            if self._arguments.run and (missed := pack_caches(machine.caches, self._out)):
                print(f"{missed} files of the caches did not fit and stay here")
        print(json.dumps(machine.state(self._said)))
        return code

    def _run_stages(self) -> int:
        stages = self._arguments.run
        if stages[0] in OPS_S:
            words = [sys.executable, "-m", "sglang_dflash.gpu.ops", "--output", self._machine.results]
            words += ["--commit", self._arguments.commit, "--stages", *stages]
            dry = ["--dry-run"] if self._arguments.stand_in else []
            return self._watch([*words, *dry], min(self._end, time.monotonic() + OPS_LIMIT_S))
        self._machine.finish_installing(self._end)  # stages are not timed beside an installer
        lacking = sorted(set(self._arguments.needs) - set(self._machine.groups()))
        if lacking:
            self._said.append(f"not installed yet: {', '.join(lacking)}")
            return 1
        budget_s = self._end - time.monotonic() - PREPARE_S
        words = [self._machine.venv / "bin" / "python", "-m", "sglang_dflash.cli", "gpu-check"]
        words += ["--output", self._machine.results, "--commit", self._arguments.commit]
        words += ["--budget-s", f"{budget_s:.0f}"]
        words += [word for stage in stages for word in ("--stage", stage)]
        words += ["--backends", self._arguments.backends] if self._arguments.backends else []
        stand_in = ["--stand-in", self._arguments.stand_in] if self._arguments.stand_in else []
        return self._watch([*words, *stand_in], self._end)

    def _watch(self, words: Sequence[object], end: float) -> int:
        """Runs a command until `end`, and hands results back whenever there are new ones."""
        environment = os.environ | self._machine.variables()
        with self._log.open("ab") as log:
            process = subprocess.Popen([str(word) for word in words], stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(LOOK_S)
                self._hand_back_news()
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
                process.kill()
                process.wait()
            print(self._log.read_text(errors="replace")[-SHOWN:], flush=True)
        return int(process.returncode not in (0, 3, 130))  # 3 and 130: something is left for another call

    def _hand_back_news(self) -> None:
        files = sorted(self._machine.results.glob("*.json"))
        seen = [(path.name, path.stat().st_mtime_ns) for path in files]
        if seen != self._seen:
            self._seen = seen
            self._hand_back()

    def _hand_back(self) -> None:
        place = self._out / "results.tar.gz"
        pack_results(self._machine.results.parent, self._arguments.commit, place, (".json", ".md", ".log"))
        shutil.copyfile(self._log, self._out / "log.txt")
        write_whole(self._out / "state.json", json.dumps(self._machine.state(self._said), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: Call(parse_arguments()).go()))

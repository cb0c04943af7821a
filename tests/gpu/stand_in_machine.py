"""Stands in for a GPU machine without a network: a folder with the rules that cost an hour where they are forgotten.

A transfer has a limit. A carried folder replaces the one there. The output folder is emptied before each command, and
only few files of plain names come back. Processes end with their call unless they have a session of their own. The
machine can be lost with all that is on it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
COMMAND_LENGTH = 2000
BACK_FILES, BACK_FILE_BYTES, BACK_BYTES, BACK_DEPTH = 8, 16 * MIB, 64 * MIB, 2
NAME = re.compile(r"[A-Za-z0-9._-]+")


class StandInMachine:
    def __init__(self, checkout: Path, folder: Path, transfer_bytes: int) -> None:
        self._checkout, self.folder, self._transfer_bytes = checkout, folder, transfer_bytes
        self._calls = 0

    @property
    def work(self) -> Path:
        return self.folder / "tmp" / "sglang-dflash-hour"

    def call(
        self, command: str, carry: str, limit_s: float, cut: Callable[[Path], bool] = lambda out: False
    ) -> tuple[int, str, Path]:
        """Makes a transfer and runs a command.

        Args:
            carry: the ignored folder that travels along.
            cut: the command is killed as at its limit once this is true of the output folder.

        Returns:
            Exit code, output, and a folder with what came back.
        """
        assert len(command) <= COMMAND_LENGTH
        if not self.folder.exists():
            self._start()
        self._transfer(carry)
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        said = self.folder / "said"
        with said.open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder / "repository",
                env=self._variables(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < end and not cut(out):
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        return code, said.read_text(errors="replace"), self._back(out)

    def processes(self) -> list[int]:
        """Ids of what runs on the machine."""
        mark = f"TMPDIR={self.folder / 'tmp'}\0".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    def lose(self) -> None:
        """Gives the machine back: all that is on it goes."""
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        shutil.rmtree(self.folder)

    def _start(self) -> None:
        for name in ("repository", "tmp", "programs"):
            (self.folder / name).mkdir(parents=True)
        programs = {"python3": f'exec {sys.executable} "$@"', "nvidia-smi": 'echo "NVIDIA Fake 1, 1 MiB, 0"'}
        for name, line in programs.items():
            place = self.folder / "programs" / name
            place.write_text(f"#!/bin/sh\n{line}\n")
            place.chmod(0o755)

    def _variables(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder / "programs"), "/usr/bin", "/bin"])
        return {"PATH": path, "TMPDIR": str(self.folder / "tmp"), "BACK": str(self.folder / "out"), "HOME": "/nowhere"}

    def _transfer(self, carry: str) -> None:
        listed = subprocess.run(
            ["git", "-C", str(self._checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        )
        names = [name for name in listed.stdout.split("\0") if name]
        carried = [path for path in (self._checkout / carry).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in [*carried, *(self._checkout / name for name in names)])
        assert size <= self._transfer_bytes, f"{size} bytes are more than a transfer takes ({self._transfer_bytes})"
        for name in names:
            source, place = self._checkout / name, self.folder / "repository" / name
            if not place.exists() or place.stat().st_mtime_ns != source.stat().st_mtime_ns:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place)
        place = self.folder / "repository" / carry
        shutil.rmtree(place, ignore_errors=True)
        if carried:
            shutil.copytree(self._checkout / carry, place)

    def _back(self, out: Path) -> Path:
        files = [path for path in out.rglob("*") if path.is_file()]
        sizes = [path.stat().st_size for path in files]
        assert len(files) <= BACK_FILES and max(sizes, default=0) <= BACK_FILE_BYTES and sum(sizes) <= BACK_BYTES
        for path in files:
            names = path.relative_to(out).parts
            assert len(names) <= BACK_DEPTH + 1 and all(NAME.fullmatch(name) for name in names), path
        self._calls += 1
        back = self.folder.with_name(f"back-{self._calls}")
        shutil.copytree(out, back)
        return back

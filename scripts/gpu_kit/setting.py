"""What every stage gets: folders, the time budget, how servers start."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from gpu_kit.budget import Budget
from sglang_dflash.bench.arms import Arm


@dataclass(frozen=True, slots=True)
class Setting:
    """
    Fields:
        raw: folder of logs, traces and half-finished sweeps.
        models: folder of dummy models.
        backends: attention backends, in order.
        server_flags: flags of every server, as one quoted string.
        stand_in: dry run: a script that replaces SGLang and the checker. None: the real ones.
        rehearsal: real servers on a CPU with small shapes and few requests; its numbers are not valid.
        command: the command line of this call.
    """

    raw: Path
    models: Path
    budget: Budget
    screen: Console
    backends: tuple[str, ...]
    server_flags: str
    stand_in: Path | None
    command: str
    rehearsal: bool = False

    def launched(self, arm: Arm) -> Arm:
        """The arm, served by the stand-in if there is one."""
        if self.stand_in is None:
            return arm
        return replace(arm, launch=(sys.executable, str(self.stand_in), "serve"), health="/health")

    def checker(self) -> list[str]:
        """The command of `sglang-dflash check`, without arguments."""
        if self.stand_in is not None:
            return [sys.executable, str(self.stand_in), "check"]
        return [sys.executable, "-m", "sglang_dflash.cli", "check"]

    def flags(self) -> list[str]:
        return shlex.split(self.server_flags)

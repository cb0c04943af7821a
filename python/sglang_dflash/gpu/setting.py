"""What every stage gets: folders, the time budget, which arms are served and how servers start."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from sglang_dflash.gpu.budget import Budget
from sglang_dflash.gpu.results import Stage
from sglang_dflash.serving import Arm

NO_PREFILL_GRAPHS = ("--cuda-graph-backend-prefill", "disabled")  # capturing them only makes a start longer
EMBEDDED_FLAGS = (
    *("--max-total-tokens", "65536"),  # else the small pair gets a pool of some 30 million slots
    *("--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16"),
    *NO_PREFILL_GRAPHS,
)
"""Flags of every server of the embedded pair."""


@dataclass(frozen=True, slots=True)
class Setting:
    """
    Fields:
        raw: folder of logs, traces and half-finished sweeps.
        models: folder of dummy models.
        backends: attention backends, in order.
        server_flags: flags of every server, as one quoted string; they win over the check's own.
        stand_in: dry run: a script that replaces SGLang and the checker. None: the real ones.
        command: the command line of this call.
        keep: called with the stage whenever it has measured something, because a call may be killed at any time.
        no_builtin: why the built-in worker is not served; "" if it is.
        rehearsal: real servers on a CPU with small shapes and few requests; its numbers are not valid.
    """

    raw: Path
    models: Path
    budget: Budget
    screen: Console
    backends: tuple[str, ...]
    server_flags: str
    stand_in: Path | None
    command: str
    keep: Callable[[Stage], None]
    no_builtin: str = ""
    rehearsal: bool = False

    def served(self, arms: Iterable[Arm]) -> list[Arm]:
        """The arms that can start here; they are the stand-in's if there is one."""
        found = [arm for arm in arms if arm.name != "builtin" or not self.no_builtin]
        if self.stand_in is None:
            return found
        launch = (sys.executable, str(self.stand_in), "serve")
        return [replace(arm, launch=launch, health="/health") for arm in found]

    def note_absent(self, stage: Stage) -> None:
        """Says in the stage which arm it lacks, and why."""
        lacks = bool(self.no_builtin) and not any(row["arm"] == "builtin" for row in stage.rows)
        stage.absent = ["builtin"] if lacks else []
        stage.notes += [self.no_builtin] if lacks else []

    def checker(self) -> list[str]:
        """The command of `sglang-dflash check`, without arguments."""
        if self.stand_in is not None:
            return [sys.executable, str(self.stand_in), "check"]
        return [sys.executable, "-m", "sglang_dflash.cli", "check"]

    def flags(self, backend: str) -> list[str]:
        """Flags of every server on this attention backend."""
        # FlashInfer's sampling needs its headers, too: only its own stages depend on them.
        sampling = [] if backend == "flashinfer" else ["--sampling-backend", "pytorch"]
        return [*sampling, *shlex.split(self.server_flags)]

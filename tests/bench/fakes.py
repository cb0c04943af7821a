"""Arms whose servers are `fake_server.py`, and a plan over them, timed by `fake_client.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from sglang_dflash.bench.board import Board
from sglang_dflash.bench.plan import Plan
from sglang_dflash.bench.records import CellKey, Run
from sglang_dflash.bench.sweep import Sweep
from sglang_dflash.serving import Arm, timing
from sglang_dflash.serving.endpoint import Sampling
from sglang_dflash.serving.sessions import Session

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
REAL_CLIENT = timing.COMMAND
timing.COMMAND = (sys.executable, str(Path(__file__).with_name("fake_client.py")))


class Rendered:
    """Renders a chat with one token per character, and counts words."""

    def __call__(self, messages: Sequence[dict[str, Any]], template: dict[str, object]) -> list[int]:
        return [ord(letter) for message in messages for letter in f"{message['role']}:{message['content']}\n"]

    def count(self, text: str) -> int:
        return len(text.split())


render: Any = Rendered()


def fake_arm(name: str, *flags: str, engine: str = "sglang", **fields: Any) -> Arm:
    return Arm(name, engine, launch=(sys.executable, str(FAKE_SERVER)), arguments=flags, health="/health", **fields)


def make_plan(folder: Path, *arms: Arm, **changes: Any) -> Plan:
    """Two loads, one dataset of four one-turn sessions, six tokens each; `changes` replace fields."""
    fields: dict[str, Any] = {
        "arms": arms,
        "target": "fake",
        "workload": "closed",
        "loads": (1.0, 2.0),
        "datasets": {"letters": [Session.of_texts(f"s{i}", [f"question {i}"]) for i in range(4)]},
        "counts": {1.0: 4, 2.0: 4},
        "repeats": 1,
        "interleave": False,
        "together": False,
        "sampling": Sampling(6),
        "seed": 0,
        "think_s": 0.0,
        "stall_s": 20.0,
        "start_s": 20.0,
        "logs": folder / "logs",
    }
    return Plan(**{**fields, **changes})


def go(plan: Plan, folder: Path, run: Run | None = None) -> Run:
    """Runs the plan and saves the run in `folder`."""
    run = run or Run("test", plan.workload, {})
    screen = Console(file=(folder / "screen.txt").open("a"), width=200)
    Sweep(plan, run, render, folder / "run.json").go(lambda cells, starts: Board(screen, cells, starts))
    return run


def key(arm: str, load: float = 1.0, repeat: int = 0, dataset: str = "letters") -> CellKey:
    return CellKey(arm, "", True, dataset, load, repeat)


def marked(folder: Path) -> list[psutil.Process]:
    """The processes with `--mark folder`."""
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]

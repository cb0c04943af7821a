"""Arms whose servers are `fake_server.py`, and a plan over them."""

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
from sglang_dflash.serving import Arm
from sglang_dflash.serving.endpoint import Sampling
from sglang_dflash.serving.sessions import Session

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


def render(messages: Sequence[dict[str, Any]], template: dict[str, object], tools: Sequence[object] = ()) -> list[int]:
    """Renders a chat with one token per character, as the fake server does."""
    return [ord(letter) for message in messages for letter in f"{message['role']}:{message['content']}\n"]


render.template = {}


def fake_arm(name: str, *flags: str, engine: str = "sglang", **fields: Any) -> Arm:
    return Arm(name, engine, launch=(sys.executable, str(FAKE_SERVER)), arguments=flags, health="/health", **fields)


def make_plan(folder: Path, *arms: Arm, **changes: Any) -> Plan:
    """Two loads, one dataset of four one-turn sessions, six tokens each; `changes` replace fields."""
    fields: dict[str, Any] = {
        "arms": arms,
        "workload": "closed",
        "loads": (1.0, 2.0),
        "datasets": {"letters": [Session.of_texts(f"s{i}", [f"question {i}"]) for i in range(4)]},
        "counts": {1.0: 4, 2.0: 4},
        "repeats": 1,
        "interleave": False,
        "together": False,
        "sampling": Sampling(6),
        "seed": 0,
        "stall_s": 20.0,
        "start_s": 20.0,
        "warm_up": False,
        "logs": folder / "logs",
    }
    return Plan(**{**fields, **changes})


def go(plan: Plan, folder: Path, run: Run | None = None) -> Run:
    """Runs the plan and saves the run in `folder`."""
    run = run or Run("test", plan.workload, {})
    screen = Console(file=(folder / "screen.txt").open("a"), width=200)
    Sweep(plan, run, render, folder / "run.json").go(lambda cells, starts: Board(screen, cells, starts))  # type: ignore[arg-type]
    return run


def key(arm: str, load: float = 1.0, repeat: int = 0, dataset: str = "letters") -> CellKey:
    return CellKey(arm, "", True, dataset, load, repeat)


def servers_of(folder: Path) -> list[psutil.Process]:
    """The servers with `--mark folder`."""
    return [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]

"""Runs with known numbers, made without a server."""

from __future__ import annotations

from typing import Any

from sglang_dflash.bench.records import Cell, CellKey, Equality, Run
from sglang_dflash.serving import AcceptanceStats
from sglang_dflash.serving.records import Record


def record(session: str = "a", turn: int = 0, start_s: float = 0.0, **fields: Any) -> Record:
    """A request of ten tokens: the first after 0.1 s, the last after 1 s."""
    held = {"first_s": start_s + 0.1, "end_s": start_s + 1.0, "prompt_tokens": 20, "tokens": 10, "ids": [], "text": ""}
    return Record(session, turn, start_s, **{**held, "finish": "length", **fields})


def key(arm: str = "off", load: float = 1, repeat: int = 0, **fields: Any) -> CellKey:
    return CellKey(**{"arm": arm, "backend": "", "radix": True, "dataset": "gsm8k", **fields}, load=load, repeat=repeat)


def cell(arm: str, tok_s: float, load: float = 1, repeat: int = 0, **fields: Any) -> Cell:
    """A cell with one request; its speed is exactly `tok_s` if that divides 1000."""
    names = ("backend", "radix", "dataset")
    where = {name: fields.pop(name) for name in names if name in fields}
    wall_s = 1000 / tok_s
    one = record(tokens=1000, first_s=wall_s / 4, end_s=wall_s)
    return Cell(key(arm, load, repeat, **where), **{"records": [one], "wall_s": wall_s, **fields})


def accepting(*by_position: int, steps: int, drafts: int) -> AcceptanceStats:
    return AcceptanceStats(steps, steps * drafts, sum(by_position), list(by_position))


def run(cells: list[Cell], workload: str = "closed", **fields: Any) -> Run:
    command = fields.pop("command", "benchmark_sglang.py --arms off,dflash")
    return Run(command, workload, fields.pop("options", {}), cells=cells, **fields)


def unequal(different: int = 3, compared: int = 48, **fields: Any) -> Equality:
    return Equality("off", True, compared, compared - different, different=different, **fields)


def small_sweep(loads: tuple[float, ...] = (1, 8), repeats: int = 2) -> Run:
    """Two datasets, three arms."""
    speeds, tau, cells = {"off": 100, "builtin": 210, "dflash": 290}, accepting(80, 50, 20, steps=100, drafts=7), []
    for repeat in range(repeats):
        for dataset in ("gsm8k", "mt-bench"):
            for load in loads:
                for arm, speed in speeds.items():
                    fields = {} if arm == "off" else {"acceptance": tau}
                    cells.append(cell(arm, speed * load / (1 + repeat), load, repeat, dataset=dataset, **fields))
    return run(cells, machine={"gpus": ["H100"], "cores": 16}, versions={"sglang": "0.5.23"})

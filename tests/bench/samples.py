"""Runs with known numbers, made without a server."""

from __future__ import annotations

import math
import random
from typing import Any

from sglang_dflash.bench.records import Cell, CellKey, Equality, Record, Run, total_acceptance
from sglang_dflash.serving import AcceptanceStats

SPEED = {"off": 1.0, "builtin": 2.1, "dflash": 2.9, "eagle3": 1.7, "vllm": 2.0}
HARD = {"gsm8k": 1.0, "humaneval": 1.15, "mt-bench": 0.7}
ACCEPTED = {"dflash": 0.86, "builtin": 0.84, "eagle3": 0.68, "vllm": 0.8}
DRAFTS = {"dflash": 15, "builtin": 15, "eagle3": 5, "vllm": 7}


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
    return Run(command, workload, {}, cells=cells, **fields)


def unequal(different: int = 3, compared: int = 48, **fields: Any) -> Equality:
    return Equality("off", True, compared, compared - different, different=different, **fields)


def realistic(
    arms: tuple[str, ...] = ("off", "builtin", "dflash", "eagle3"),
    loads: tuple[float, ...] = (1, 2, 4, 8),
    repeats: int = 3,
    noise: float = 0.03,
    seed: int = 0,
) -> Run:
    """Three datasets; speculation gains less as the load grows."""
    rng = random.Random(seed)
    cells = []
    for repeat in range(repeats):
        for dataset, hard in HARD.items():
            for load in loads:
                for arm in arms:
                    gain = (SPEED[arm] - 1) * hard * (1.1 - 0.22 * math.log2(load)) + 1
                    speed = 40 * load**0.8 * gain * math.exp(rng.gauss(0, noise))
                    cells.append(_cell(rng, key(arm, load, repeat, dataset=dataset), speed))
    return run(cells, machine={"gpu": "H100", "cpus": 16}, versions={"sglang": "0.5.23"})


def _cell(rng: random.Random, where: CellKey, speed: float, requests: int = 6) -> Cell:
    share = ACCEPTED.get(where.arm, 0.0) * min(1.0, 0.9 + 0.1 * HARD.get(where.dataset, 1.0))
    each_s = 200 * where.load / speed
    held = []
    for i in range(requests):
        ids = rng.getrandbits(30)
        start_s = (i // where.load) * each_s
        steps, histogram = _histogram(rng, share, DRAFTS.get(where.arm, 0))
        held.append(
            record(
                f"q{i}",
                start_s=start_s,
                first_s=start_s + 0.04 * where.load**0.5 * rng.uniform(0.9, 1.2),
                end_s=start_s + each_s,
                tokens=200,
                ids=[ids],
                steps=steps,
                drafted=steps * DRAFTS.get(where.arm, 0),
                accept_histogram=histogram,
            )
        )
    same = (
        None if where.arm == "off" else Equality("off", where.arm != "vllm", requests, requests - (where.arm == "vllm"))
    )
    wall_s = requests * 200 / speed
    return Cell(where, held, wall_s, total_acceptance(held), same)


def _histogram(rng: random.Random, share: float, drafts: int) -> tuple[int, list[int]]:
    if not drafts:
        return 0, []
    histogram = [0] * (drafts + 1)
    for _ in range(60):
        length = 0
        while length < drafts and rng.random() < share:
            length += 1
        histogram[length] += 1
    return 60, histogram


def agent(
    arms: tuple[str, ...] = ("off", "dflash"),
    turns: int = 6,
    repeats: int = 2,
    loads: tuple[float, ...] = (4,),
    workload: str = "agent",
) -> Run:
    """Sessions whose prompts grow by 800 tokens per turn; without the prefix cache, TTFT grows with them."""
    rng = random.Random(1)
    cells = []
    for repeat in range(repeats):
        for load in loads:
            for radix in (True, False):
                for arm in arms:
                    cells.append(_sessions(rng, key(arm, load, repeat, dataset="agent", radix=radix), turns))
    return run(cells, workload)


def _sessions(rng: random.Random, where: CellKey, turns: int) -> Cell:
    held = []
    for session in range(4):
        now = 0.0
        for turn in range(turns):
            prompt = 1000 + 800 * turn
            cached = prompt - 800 if where.radix and turn else 0
            first_s = now + (prompt - cached) / 9000 * rng.uniform(0.95, 1.1)
            end_s = first_s + 100 / (60 * SPEED[where.arm])
            steps, histogram = _histogram(rng, ACCEPTED.get(where.arm, 0.0), DRAFTS.get(where.arm, 0))
            fields = {"first_s": first_s, "end_s": end_s, "prompt_tokens": prompt, "tokens": 100}
            fields |= {"cached_tokens": cached, "steps": steps, "drafted": steps * 15, "accept_histogram": histogram}
            held.append(record(f"s{session}", turn, now, **fields))
            now = end_s
    computed = sum(one.prompt_tokens - one.cached_tokens for one in held)
    prefilled = computed if where.arm == "dflash" else None
    return Cell(where, held, max(one.end_s for one in held), total_acceptance(held), prefilled=prefilled)

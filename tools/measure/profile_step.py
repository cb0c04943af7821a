"""Shows where the time of a decode step goes (scheduler, attention, linear layers, ...), speculation off and on.

Serves the embedded pair, or a dummy-weight target of Qwen3-0.6B's shape with a 3-layer draft; SGLang then simulates the
acceptance (`--tau`). `step_timers.py` adds the timers as an SGLang plugin in the server's process. A timer costs about
1 us per call; a compiled forward is timed as one call. With several `--block` values, a second table compares the
target's forward over W rows of each request with that over one row. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from sglang_dflash.gpu.dummy_pairs import make_pair
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET, Client, Server, held_out_prompts
from tools.measure.step_timers import install, read

SHAPES = {"0.6b": "qwen3-0.6b"}
"""Dummy-weight targets of `gpu.dummy_pairs`."""


def ask(client: Client, prompts: list[list[int]], concurrency: int, tokens: int) -> tuple[float, int]:
    """Returns the seconds taken and the tokens of all answers."""
    begin = time.perf_counter()
    answers = client.generate_all(prompts, concurrency, max_new_tokens=tokens, ignore_eos=True)
    return time.perf_counter() - begin, sum(len(answer.ids) for answer in answers)


def profile(server: Server, stages: Path | None, concurrency: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` rounds of `concurrency` requests."""
    client = server.client()
    tokenizer = AutoTokenizer.from_pretrained(str(TINY_TARGET))
    prompts = [tokenizer(p.prompt)["input_ids"] for p in held_out_prompts("arithmetic")[:concurrency]]
    ask(client, prompts, concurrency, tokens)
    rounds = []
    for _ in range(repeats):
        before = read(stages)
        seconds, count = ask(client, prompts, concurrency, tokens)
        after = read(stages)
        steps = max(1, after["steps"] - before["steps"])
        spent = {name: (us - before["us"].get(name, 0.0)) / steps for name, us in after["us"].items()}
        rows = {name: n - before["calls"].get(name, 0) for name, n in after["calls"].items()}
        targets_us = after["targets_us"][len(before["targets_us"]) :]
        rounds.append(
            {
                "tok_s": count / seconds,
                "step_us": seconds / steps * 1e6 if stages else 0.0,
                "target_us": statistics.median(targets_us or [0.0]),  # prefills are few
                "us": spent | {"outside the scheduler's steps": seconds / steps * 1e6 - sum(spent.values())}
                if stages
                else {},
                "calls": {name: round(n / steps, 1) for name, n in rows.items()},
            }
        )
    middle = sorted(rounds, key=lambda one: one["tok_s"])[len(rounds) // 2]
    return middle | {"tok_s": statistics.median(one["tok_s"] for one in rounds)}


def show(console: Console, title: str, results: dict[str, dict[str, Any]]) -> None:
    table = Table(title=title)
    table.add_column("us per step")
    for name in results:
        table.add_column(name, justify="right")
    stages = {
        stage: max(r["us"].get(stage, 0.0) for r in results.values()) for r in results.values() for stage in r["us"]
    }
    for stage in sorted(stages, key=lambda one: -stages[one]):
        if stages[stage] >= 20:
            table.add_row(stage, *(f"{r['us'].get(stage, 0.0):.0f}" for r in results.values()))
    table.add_section()
    if stages:
        table.add_row("step", *(f"{r['step_us']:.0f}" for r in results.values()))
    table.add_row("tok/s", *(f"{r['tok_s']:.1f}" for r in results.values()))
    console.print(table)


def show_widths(console: Console, results: dict[str, dict[str, Any]], blocks: list[int], counts: list[int]) -> None:
    """Prints the target's forward time over W rows of each request, and its ratio to one row (the off arm)."""
    table = Table(title="the target's forward over W rows of each request")
    table.add_column("W", justify="right")
    for count in counts:
        table.add_column(f"us, {count} at once", justify="right")
        table.add_column("over one row", justify="right")
    rows = [(1, "off"), *((block, f"on {block}") for block in blocks)]
    for width, arm in rows:
        cells: list[str] = []
        for count in counts:
            us, one = (results.get(f"{name}, {count}", {}).get("target_us", 0.0) for name in (arm, "off"))
            cells += [f"{us:.0f}", f"{us / one:.2f}" if one else "-"]
        table.add_row(str(width), *cells)
    console.print(table)


def main(
    model: Annotated[str, typer.Option(help="tiny, or the shape of a dummy target: " + ", ".join(SHAPES))] = "tiny",
    arms: Annotated[str, typer.Option(help="off, on or both, comma-separated.")] = "off,on",
    requests: Annotated[str, typer.Option(help="Concurrent requests, comma-separated.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 96,
    repeats: Annotated[int, typer.Option(help="Rounds; the median one is shown.")] = 5,
    block: Annotated[str, typer.Option(help="--speculative-num-draft-tokens, comma-separated.")] = "8",
    tau: Annotated[float, typer.Option(help="Simulated mean commit_len (dummy weights need it); 0: none.")] = 0.0,
    threads: Annotated[str, typer.Option(help="OMP_NUM_THREADS; empty: leave it unset.")] = "1",
    timers: Annotated[bool, typer.Option(help="Off: measure tok/s only, without timer overhead.")] = True,
) -> None:
    console = Console(width=140)
    folder = Path(tempfile.mkdtemp())
    target, draft = (TINY_TARGET, TINY_DRAFT) if model == "tiny" else make_pair(SHAPES[model], folder)
    base = ["--device", "cpu", "--model-path", str(target), "--dtype", "float32", "--max-total-tokens", "8192"]
    base += ["--max-running-requests", "8", "--disable-radix-cache"] + (
        [] if model == "tiny" else ["--load-format", "dummy"]
    )
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    blocks, counts = ([int(one) for one in text.split(",")] for text in (block, requests))
    runs: list[tuple[str, list[str]]] = []
    for arm in arms.split(","):
        several = arm == "on" and len(blocks) > 1
        for size in blocks if arm == "on" else [1]:
            options = [*speculate, "--speculative-num-draft-tokens", str(size)] if arm == "on" else []
            runs.append((f"{arm} {size}" if several else arm, options))
    results: dict[str, dict[str, Any]] = {}
    for name, options in runs:
        stages = folder / f"{name}.json" if timers else None
        environment = install(folder, stages) if stages else {}
        environment |= {"OMP_NUM_THREADS": threads} if threads else {}
        if stages:
            environment["SGLANG_DFLASH_TURN_MS"] = "0"  # stages are counted by the scheduler's turns: one step each
        environment["SGLANG_DFLASH_WIDTH"] = "full"  # adaptive widths would verify fewer than W rows
        if tau and options:
            environment["SGLANG_SIMULATE_ACC_LEN"] = str(tau)
        begin = time.perf_counter()
        with Server([*base, *options], folder / f"{name}.log", environment) as server:
            console.print(f"{name}: up after {time.perf_counter() - begin:.1f} s, load {os.getloadavg()[0]:.1f}")
            for count in counts:
                results[f"{name}, {count}"] = profile(server, stages, count, tokens, repeats)
    show(console, f"{model}, {threads or 'unset'} threads, block {block}, tau {tau or 'real'}", results)
    if timers and len(blocks) > 1:
        show_widths(console, results, blocks, counts)
    print(json.dumps({"model": model, "threads": threads, "block": block, "tau": tau, "arms": results}))


if __name__ == "__main__":
    typer.run(main)

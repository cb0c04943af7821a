"""Shows where a decode step's time goes on a CPU (scheduler, attention, linear layers, ...), speculation off and on.

Serves the embedded pair, or the given target and draft; flags after `--` go to the server. `step_timers.py` adds the
timers as an SGLang plugin in the server's process. A timer costs about 1 us per call; a compiled forward is timed as
one call. With several `--block` values, a second table compares the target's forward over W rows of each request with
that over one row. The last line is JSON. Dummy weights need SGLANG_SIMULATE_ACC_LEN in the environment.
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

from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET, Client, Server, held_out_prompts
from tools.measure.step_timers import install, read


def ask(client: Client, prompts: list[str], tokens: int) -> tuple[float, int]:
    """All prompts at once. Returns the seconds taken and the tokens of all answers."""
    begin = time.perf_counter()
    answers = client.generate_all(prompts, len(prompts), max_new_tokens=tokens, ignore_eos=True)
    return time.perf_counter() - begin, sum(len(answer.ids) for answer in answers)


def profile(server: Server, stages: Path | None, concurrency: int, tokens: int, repeats: int) -> dict[str, Any]:
    """The median one of `repeats` rounds of `concurrency` requests."""
    client = server.client()
    prompts = [prompt.prompt for prompt in held_out_prompts("arithmetic")[:concurrency]]
    ask(client, prompts, tokens)
    rounds = []
    for _ in range(repeats):
        before = read(stages)
        seconds, count = ask(client, prompts, tokens)
        after = read(stages)
        steps = max(1, after["steps"] - before["steps"])
        us = {name: (total - before["us"].get(name, 0.0)) / steps for name, total in after["us"].items()}
        if stages:
            us["outside the scheduler's steps"] = seconds / steps * 1e6 - sum(us.values())
        calls = {name: round((n - before["calls"].get(name, 0)) / steps, 1) for name, n in after["calls"].items()}
        targets_us = after["targets_us"][len(before["targets_us"]) :]
        one = {"tok_s": count / seconds, "us": us, "calls": calls, "step_us": seconds / steps * 1e6 if stages else 0.0}
        rounds.append(one | {"target_us": statistics.median(targets_us or [0.0])})  # prefills are few
    return sorted(rounds, key=lambda one: one["tok_s"])[len(rounds) // 2]


def show(console: Console, results: dict[str, dict[str, Any]]) -> None:
    table = Table("us per step")
    for name in results:
        table.add_column(name, justify="right")
    stages = dict.fromkeys(stage for result in results.values() for stage in result["us"])
    most = {stage: max(result["us"].get(stage, 0.0) for result in results.values()) for stage in stages}
    for stage in sorted(stages, key=lambda stage: -most[stage]):
        if most[stage] >= 20:
            table.add_row(stage, *(f"{result['us'].get(stage, 0.0):.0f}" for result in results.values()))
    table.add_section()
    if stages:
        table.add_row("step", *(f"{result['step_us']:.0f}" for result in results.values()))
    table.add_row("tok/s", *(f"{result['tok_s']:.1f}" for result in results.values()))
    console.print(table)


def show_widths(console: Console, results: dict[str, dict[str, Any]], blocks: list[int], counts: list[int]) -> None:
    """Prints the target's forward time over W rows of each request, and its ratio to one row (the off arm)."""
    table = Table("W", title="the target's forward over W rows of each request")
    for count in counts:
        table.add_column(f"us, {count} at once", justify="right")
        table.add_column("over one row", justify="right")
    for width, arm in [(1, "off"), *((block, f"on {block}") for block in blocks)]:
        cells: list[str] = []
        for count in counts:
            us, one = (results.get(f"{name}, {count}", {}).get("target_us", 0.0) for name in (arm, "off"))
            cells += [f"{us:.0f}", f"{us / one:.2f}" if one else "-"]
        table.add_row(str(width), *cells)
    console.print(table)


def main(
    server_flags: Annotated[list[str] | None, typer.Argument(help="For every server, after --.")] = None,
    model_path: Annotated[Path, typer.Option(help="The target.")] = TINY_TARGET,
    draft: Annotated[Path, typer.Option(help="Its draft.")] = TINY_DRAFT,
    arms: Annotated[str, typer.Option(help="off, on or both, comma-separated.")] = "off,on",
    requests: Annotated[str, typer.Option(help="Concurrent requests, comma-separated.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 96,
    repeats: Annotated[int, typer.Option(help="Rounds; the median one is shown.")] = 5,
    block: Annotated[str, typer.Option(help="--speculative-num-draft-tokens, comma-separated.")] = "8",
    threads: Annotated[str, typer.Option(help="OMP_NUM_THREADS; empty: leave it unset.")] = "1",
    timers: Annotated[bool, typer.Option(help="Off: measure tok/s only, without timer overhead.")] = True,
) -> None:
    console = Console(width=140)
    folder = Path(tempfile.mkdtemp())
    base = ["--device", "cpu", "--model-path", str(model_path), "--dtype", "float32", "--max-total-tokens", "8192"]
    base += ["--max-running-requests", "8", "--disable-radix-cache", *(server_flags or [])]
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    blocks, counts = ([int(one) for one in text.split(",")] for text in (block, requests))
    runs: list[tuple[str, list[str]]] = [("off", [])] if "off" in arms.split(",") else []
    if "on" in arms.split(","):
        for size in blocks:
            options = [*speculate, "--speculative-num-draft-tokens", str(size)]
            runs.append((f"on {size}" if len(blocks) > 1 else "on", options))
    results: dict[str, dict[str, Any]] = {}
    for name, options in runs:
        stages = folder / f"{name}.json" if timers else None
        environment = install(folder, stages) if stages else {}
        environment |= {"OMP_NUM_THREADS": threads} if threads else {}
        environment["SGLANG_DFLASH_WIDTH"] = "full"  # `auto` would verify fewer than W rows
        begin = time.perf_counter()
        with Server([*base, *options], folder / f"{name}.log", environment) as server:
            console.print(f"{name}: up after {time.perf_counter() - begin:.1f} s, load {os.getloadavg()[0]:.1f}")
            for count in counts:
                results[f"{name}, {count}"] = profile(server, stages, count, tokens, repeats)
    show(console, results)
    if timers and len(blocks) > 1:
        show_widths(console, results, blocks, counts)
    print(json.dumps({"model": str(model_path), "threads": threads, "block": block, "arms": results}))


if __name__ == "__main__":
    typer.run(main)

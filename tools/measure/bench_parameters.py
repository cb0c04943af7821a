"""Measures what a request's sampling parameters cost per verify step.

One server answers the same prompts with each set of parameters in turn. Prints the median time of a step per case and
concurrency, and its ratio to plain greedy decoding. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_dflash.serving import TINY_DRAFT, TINY_ENVIRONMENT, TINY_TARGET, Completion, Server, held_out_prompts

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"frequency_penalty": 1e-6, "presence_penalty": 1e-6, "repetition_penalty": 1.000001},
    "min_new_tokens": {"min_new_tokens": 1},
    "logit_bias": {"logit_bias": {"5": 1e-6}},
    "regex": {"regex": "(.|\\n)*"},
    "temperature": {"temperature": 1e-3},
    "temperature, top_p": {"temperature": 1e-3, "top_p": 0.99},
}
"""Values that (nearly) keep the answers of greedy decoding, so that the steps are comparable."""


def steps_us(answers: list[Completion], seconds: float, concurrency: int) -> float:
    """Wall time per verify step of one request, in microseconds."""
    return seconds * concurrency / max(1, sum(answer.steps for answer in answers)) * 1e6


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; the median is reported.")] = 5,
    prompts: Annotated[int, typer.Option(min=8, help="Requests per case and round.")] = 24,
    tokens: Annotated[int, typer.Option(min=8, help="Maximum tokens per answer.")] = 96,
) -> None:
    console = Console()
    asked = [prompt.prompt for prompt in held_out_prompts()[:: max(1, 600 // prompts)]][:prompts]
    arguments = ["--device", "cpu", "--model-path", str(TINY_TARGET), "--dtype", "float32"]
    arguments += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(TINY_DRAFT)]
    arguments += ["--max-total-tokens", "16384", "--max-running-requests", "16"]
    times: dict[tuple[str, int], list[float]] = {}
    log = Path(tempfile.mkdtemp()) / "server.log"
    whole_blocks = {"SGLANG_DFLASH_WIDTH": "full"}
    with Server(arguments, log, TINY_ENVIRONMENT | whole_blocks) as server, Progress(console=console) as progress:
        client = server.client()
        task = progress.add_task("measuring", total=(repeats + 1) * 2 * len(CASES))
        for round_number in range(repeats + 1):  # the first round warms up
            for concurrency in (1, 8):
                for name, sampling in CASES.items():
                    begin = time.perf_counter()
                    answers = client.generate_all(
                        asked, concurrency, max_new_tokens=tokens, ignore_eos=True, **sampling
                    )
                    seconds = time.perf_counter() - begin
                    if round_number:
                        times.setdefault((name, concurrency), []).append(steps_us(answers, seconds, concurrency))
                    progress.advance(task)
    table = Table(title=f"time per verify step, median of {repeats} (min to max), us")
    for column in ("", "1 request", "ratio to greedy", "8 requests", "ratio to greedy"):
        table.add_column(column)
    for name in CASES:
        row = [name]
        for concurrency in (1, 8):
            own, plain = times[name, concurrency], times["greedy", concurrency]
            row.append(f"{statistics.median(own):.0f} ({min(own):.0f} to {max(own):.0f})")
            row.append(f"{statistics.median(a / b for a, b in zip(own, plain, strict=True)):.3f}")
        table.add_row(*row)
    console.print(table)
    print(json.dumps({f"{name} at {n}": values for (name, n), values in times.items()}))


if __name__ == "__main__":
    typer.run(main)

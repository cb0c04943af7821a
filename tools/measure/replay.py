"""What a better draft would bring: drafts that replay the answers of speculation off, right as often as asked.

Serves the target with speculation off, then with DFLASH, whose draft runs as always while its proposals are replaced by
the answers, wrong at seeded places. So a step costs what the draft costs, at the acceptance of a better one. Tokens are
compared first. Flags after `--` go to the servers. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.serving import AcceptanceStats, Completion, Progress, Server
from sglang_dflash.serving.device import device_flags
from sglang_dflash.serving.prompts import read_rows, session_of
from sglang_dflash.serving.rendering import Renderer, prompt_of

PLUGINS = Path(__file__).parents[2] / "tests/families/plugins"
console = Console(stderr=True, highlight=False)


def share_right(tau: float, block_size: int) -> float:
    """The chance of each draft to be right with which a block of `block_size` rows commits `tau` tokens in the mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        reached = sum(middle**depth for depth in range(block_size))
        low, high = (middle, high) if reached < tau else (low, middle)
    return low


def ask(server: Server, prompts: Sequence[list[int]], concurrency: int, tokens: int) -> tuple[list[Completion], float]:
    """The answers, and tokens per second."""
    client = server.client()
    client.flush_when_idle()
    begin = time.perf_counter()
    answers = client.generate_all(prompts, concurrency, max_new_tokens=tokens)
    return answers, sum(len(answer.ids) for answer in answers) / (time.perf_counter() - begin)


def arm(server: Server, prompts: list[list[int]], levels: list[int], tokens: int, repeats: int) -> dict[int, Any]:
    """By number of requests at once: the answers, and the median of tokens per second."""
    found = {}
    for concurrency in levels:
        ask(server, prompts[:concurrency], concurrency, 16)  # warm-up
        rounds = [ask(server, prompts, concurrency, tokens) for _ in range(repeats)]
        found[concurrency] = rounds[0][0], statistics.median(tok_s for _, tok_s in rounds)
    return found


def main(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="Target: folder or hub name.")],
    draft: Annotated[str, typer.Option(help="Draft whose cost is measured; it need not be trained.")],
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts; of several turns the first is asked.")],
    count: Annotated[int, typer.Option(help="Number of prompts.")] = 16,
    tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 128,
    tau: Annotated[list[float], typer.Option(help="Mean commit_len; several times for several.")] = [2.0, 4.0, 6.0],  # noqa: B006
    concurrency: Annotated[list[int], typer.Option(help="Requests at once; several times for several.")] = [1],  # noqa: B006
    repeats: Annotated[int, typer.Option(help="Rounds of each; the median counts.")] = 3,
) -> None:
    renderer = Renderer(target, {}, "--target")
    sessions = islice(read_rows(prompts, "--prompts", session_of), count)
    ids = [prompt_of(session, session.turns[0].messages, renderer) for session in sessions]
    block_size = DraftConfig.from_dict(json.loads((Path(draft) / "config.json").read_text())).block_size
    flags = ["--model-path", target, *device_flags(context.args), *context.args]
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def served(arguments: list[str], environment: dict[str, str]) -> Server:
            with Progress(console).waiting("Starting a server ...") as on_wait:
                return Server(arguments, folder / "log", environment).start(on_wait=on_wait)

        with served(flags, {}) as server:
            off = arm(server, ids, concurrency, tokens, repeats)
        answers = [[prompt, answer.ids] for prompt, answer in zip(ids, off[concurrency[0]][0], strict=True)]
        (folder / "answers.json").write_text(json.dumps({"image_token": -1, "answers": answers}))
        table = Table("tau asked", "requests", "tau", "tok/s off", "tok/s", "ratio", "answers equal")
        results = []
        for wanted in tau:
            environment = {
                "PYTHONPATH": os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "REPLAYED_ANSWERS": str(folder / "answers.json"),
                "REPLAYED_TAPS": str(folder / "taps"),
                "REPLAYED_WRONG_PERCENT": str(100 * (1 - share_right(wanted, block_size))),
            }
            with served([*flags, *speculate], environment) as server:
                on = arm(server, ids, concurrency, tokens, repeats)
            for level in concurrency:
                pairs = list(zip(off[level][0], on[level][0], strict=True))
                result = {
                    "asked": wanted,
                    "requests": level,
                    "tau": AcceptanceStats.of(on[level][0]).tau,
                    "off_tok_s": off[level][1],
                    "tok_s": on[level][1],
                    "ratio": on[level][1] / off[level][1],
                    "equal": sum(one.ids == other.ids for one, other in pairs),
                }
                results.append(result)
                shown = [f"{result[key]:.2f}" for key in ("tau", "off_tok_s", "tok_s", "ratio")]
                table.add_row(f"{wanted:g}", str(level), *shown, f"{result['equal']} of {len(pairs)}")
    console.print(table)
    print(json.dumps({"prompts": len(ids), "tokens": tokens, "block_size": block_size, "results": results}))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True}, help=__doc__)(main)
    app()

"""`sglang-dflash quickstart`: serves a pair, streams its answers, and compares with speculation off."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Column, Table

from sglang_dflash.cli.shown_pairs import NAMES, Question, Shown, shown
from sglang_dflash.serving import Server, ServerError, exit_code
from sglang_dflash.serving.device import tiny_dtype

if TYPE_CHECKING:
    from openai import OpenAI

MAX_TOKENS = 200
console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Result:
    """One streamed answer. `steps`, `accepted`: verify steps and accepted drafts, 0 with speculation off."""

    text: str
    tokens: int
    seconds: float
    steps: int
    accepted: int

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_commit_len(self) -> float:
        return mean_commit_len([self])


def quickstart(
    keep: Annotated[bool, typer.Option("--keep", help="Leave a DFLASH server running; print a curl command.")] = False,
    pair: Annotated[
        str,
        typer.Option(
            help="smollm2: SmolLM2-135M-Instruct, fetched as by `sglang-dflash fetch`; tiny, hybrid: pairs of this "
            "package, built as Qwen3 and Qwen3.5, for a language of their own."
        ),
    ] = "smollm2",
) -> None:
    """Serve a pair with DFLASH, stream answers, compare with speculation off."""
    if pair not in NAMES:
        raise typer.BadParameter(f"--pair is {pair}; choose from {', '.join(NAMES)}.")
    raise typer.Exit(exit_code(partial(serve_and_compare, pair, keep), 1))


def serve_and_compare(pair: str, keep: bool) -> None:
    """
    Raises:
        ServerError: a server does not start, or fails a request.
    """
    from openai import APIError

    chosen = shown(pair, lambda line: console.print(line, soft_wrap=True))
    off_flags, on_flags = chosen.arms()
    logs = Path(tempfile.mkdtemp(prefix="sglang-dflash-quickstart-"))
    try:
        console.rule("DFLASH")
        on = run_arm(chosen, on_flags, logs / "dflash.log", show=True)
        console.rule("speculation off")
        off = run_arm(chosen, off_flags, logs / "off.log", show=False)
        summarise(chosen.questions, on, off)
        if keep:
            leave_running(chosen, on_flags, logs / "kept.log")
    except (APIError, httpx.HTTPError) as error:
        raise ServerError(f"The server failed a request: {error} (logs: {logs})") from None


def mean_commit_len(results: list[Result]) -> float:
    """Mean tokens per verify step: the accepted drafts plus the target's own token."""
    return 1 + sum(r.accepted for r in results) / max(1, sum(r.steps for r in results))


def start(chosen: Shown, arguments: list[str], log: Path) -> Server:
    server = Server(arguments, log, dict(chosen.environment))
    console.print(f"[dim]$ {' '.join(['python', *server.command[1:]])}[/dim]", soft_wrap=True)
    with console.status("starting the server ...") as status:
        begin = time.monotonic()
        server.start(on_wait=lambda waited: status.update(f"{doing(server)} ... {waited:.0f} s (log: {log})"))
    console.print(f"ready after {time.monotonic() - begin:.0f} s at {server.url}\n")
    return server


def doing(server: Server) -> str:
    """What a starting server does, by the last line of its log."""
    building = any("Building sglang-dflash's native CPU ops" in line for line in server.log_tail(1))
    return "building the native CPU ops, once" if building else "starting the server"


def run_arm(chosen: Shown, arguments: list[str], log: Path, show: bool) -> list[Result]:
    from openai import OpenAI

    with start(chosen, arguments, log) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        stream_answer(client, chosen.name, chosen.questions[-1].prompt, show=False)  # warm-up
        results = []
        for number, question in enumerate(chosen.questions, 1):
            if show:
                console.print(question.prompt, style="bold cyan", markup=False)
            else:
                console.print(f"[dim]{number}/{len(chosen.questions)} {question.name} ...[/dim]")
            result = stream_answer(client, chosen.name, question.prompt, show)
            results.append(result)
            if show:
                console.print(
                    f"[green]{result.tokens} tokens, {result.tok_s:.0f} tok/s, "
                    f"mean commit_len {result.mean_commit_len:.2f}[/green]\n"
                )
    return results


def stream_answer(client: OpenAI, model: str, prompt: str, show: bool) -> Result:
    """Asks for one greedy chat completion; prints its text as it arrives if `show`."""
    pieces: list[str] = []
    tokens = steps = accepted = 0
    begin = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_spec_tokens_details": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            pieces.append(piece)
            if show:
                console.out(piece, end="")
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        details = (getattr(chunk, "sglext", None) or {}).get("spec_tokens_details") or {}
        steps = details.get("spec_verify_ct", steps)
        accepted = details.get("spec_num_correct_drafts", accepted)
    seconds = time.monotonic() - begin
    if show:
        console.print()
    return Result("".join(pieces), tokens, seconds, steps, accepted)


def summarise(questions: Sequence[Question], on: list[Result], off: list[Result]) -> None:
    names = ("tokens", "tok/s off", "tok/s DFLASH", "ratio", "mean commit_len", "same text")
    table = Table(Column("question", no_wrap=True), *names)
    for question, a, b in zip(questions, on, off, strict=True):
        row = [f"{b.tok_s:.0f}", f"{a.tok_s:.0f}", f"{a.tok_s / b.tok_s:.2f}", f"{a.mean_commit_len:.2f}"]
        table.add_row(question.name, str(a.tokens), *row, "yes" if a.text == b.text else "NO")
    console.print(table)
    same = sum(a.text == b.text for a, b in zip(on, off, strict=True))
    rate_on = sum(r.tokens for r in on) / sum(r.seconds for r in on)
    rate_off = sum(r.tokens for r in off) / sum(r.seconds for r in off)
    console.print(
        f"{same} of {len(on)} texts identical; mean commit_len {mean_commit_len(on):.2f}; "
        f"{rate_on:.0f} tok/s with DFLASH, {rate_off:.0f} off: speedup {rate_on / rate_off:.2f}."
    )
    if same < len(on) and tiny_dtype() != "float32":
        console.print(
            f"In {tiny_dtype()} two tokens may tie up to rounding; then the texts part. `sglang-dflash check` tells "
            "such ties from differences."
        )


def leave_running(chosen: Shown, arguments: list[str], log: Path) -> None:
    server = start(chosen, arguments, log)
    body = f'{{"model": "{chosen.name}", "temperature": 0, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    print(f"The server keeps running (stop it with: kill {server.pid}). Send it a request:")
    server.let_go()
    print(f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")

"""`sglang-dflash quickstart`: serves an embedded pair, streams answers, and compares with speculation off."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Column, Table

from sglang_dflash.serving import (
    PAIRS,
    TINY_ENVIRONMENT,
    HeldOutPrompt,
    Server,
    ServerError,
    exit_code,
    held_out_prompts,
)
from sglang_dflash.serving.device import device_flags, tiny_dtype, tiny_flags

if TYPE_CHECKING:
    from openai import OpenAI

PER_KIND = 2
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
    pair: Annotated[str, typer.Option(help="dense: Qwen3; hybrid: Qwen3.5.")] = "dense",
) -> None:
    """Serve an embedded pair with DFLASH, stream answers, compare with speculation off."""
    if pair not in PAIRS:
        raise typer.BadParameter(f"--pair is {pair}; choose from {', '.join(PAIRS)}.")
    raise typer.Exit(exit_code(partial(serve_and_compare, pair, keep), 1))


def arms_of(pair: str) -> tuple[list[str], list[str]]:
    """Flags of the server with speculation off, and of the one with DFLASH."""
    target, draft = map(str, PAIRS[pair])
    named = ["--model-path", target, "--served-model-name", "tiny", "--log-level", "warning"]
    off = [*device_flags(), *tiny_flags(16384), *named]
    return off, [*off, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft]


def serve_and_compare(pair: str, keep: bool) -> None:
    """
    Raises:
        ServerError: a server does not start, or fails a request.
    """
    from openai import APIError

    off_flags, on_flags = arms_of(pair)
    prompts = [p for kind in ("code", "arithmetic", "chat") for p in held_out_prompts(kind)[:PER_KIND]]
    logs = Path(tempfile.mkdtemp(prefix="sglang-dflash-quickstart-"))
    try:
        console.rule("DFLASH")
        on = run_arm(on_flags, logs / "dflash.log", prompts, show=True)
        console.rule("speculation off")
        off = run_arm(off_flags, logs / "off.log", prompts, show=False)
        summarise(prompts, on, off)
        if keep:
            leave_running(on_flags, logs / "kept.log")
    except (APIError, httpx.HTTPError) as error:
        raise ServerError(f"The server failed a request: {error} (logs: {logs})") from None


def mean_commit_len(results: list[Result]) -> float:
    """Mean tokens per verify step: the accepted drafts plus the target's own token."""
    return 1 + sum(r.accepted for r in results) / max(1, sum(r.steps for r in results))


def start(arguments: list[str], log: Path) -> Server:
    server = Server(arguments, log, TINY_ENVIRONMENT)
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


def run_arm(arguments: list[str], log: Path, prompts: list[HeldOutPrompt], show: bool) -> list[Result]:
    from openai import OpenAI

    with start(arguments, log) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        stream_answer(client, prompts[-1].prompt, show=False)  # warm-up
        results = []
        for number, prompt in enumerate(prompts, 1):
            if show:
                console.print(f"{prompt.kind}: {prompt.prompt}", style="bold cyan", markup=False)
            else:
                console.print(f"[dim]{number}/{len(prompts)} {prompt.kind} ...[/dim]")
            result = stream_answer(client, prompt.prompt, show)
            results.append(result)
            if show:
                console.print(
                    f"[green]{result.tokens} tokens, {result.tok_s:.0f} tok/s, "
                    f"mean commit_len {result.mean_commit_len:.2f}[/green]\n"
                )
    return results


def stream_answer(client: OpenAI, prompt: str, show: bool) -> Result:
    """Asks for one greedy chat completion; prints its text as it arrives if `show`."""
    pieces: list[str] = []
    tokens = steps = accepted = 0
    begin = time.monotonic()
    stream = client.chat.completions.create(
        model="tiny",
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


def summarise(prompts: list[HeldOutPrompt], on: list[Result], off: list[Result]) -> None:
    names = ("tokens", "tok/s off", "tok/s DFLASH", "ratio", "mean commit_len", "same text")
    table = Table(Column("prompt", no_wrap=True), *names)
    for prompt, a, b in zip(prompts, on, off, strict=True):
        row = [f"{b.tok_s:.0f}", f"{a.tok_s:.0f}", f"{a.tok_s / b.tok_s:.2f}", f"{a.mean_commit_len:.2f}"]
        table.add_row(prompt.id, str(a.tokens), *row, "yes" if a.text == b.text else "NO")
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


def leave_running(arguments: list[str], log: Path) -> None:
    server = start(arguments, log)
    body = '{"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": "Hello!"}]}'
    print(f"The server keeps running (stop it with: kill {server.pid}). Send it a request:")
    server.let_go()
    print(f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")

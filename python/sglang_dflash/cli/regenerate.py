"""`sglang-dflash regenerate`: replaces the answers in a file of conversations by the target's own, through a server."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from sglang_dflash.cli.synthesis import Questions, Synthesis
from sglang_dflash.serving import Client, Completion, Progress, Server, ServerError
from sglang_dflash.serving.arms import START_S
from sglang_dflash.serving.device import device_flags
from sglang_dflash.serving.errors import first_line
from sglang_dflash.serving.messages import messages_of, tools_of
from sglang_dflash.serving.prompts import read_rows, session_of
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.sessions import as_openai
from sglang_dflash.training.folding import holders
from sglang_dflash.training.options import template_kwargs

_PATIENCE_S = 24 * 3600.0  # a request may wait long in the server's queue


@dataclass(frozen=True, slots=True)
class Asking:
    """The settings of a regeneration; a resumed one must have the same."""

    target: str
    source_sha256: str
    max_new_tokens: int
    temperature: float
    chat_template_kwargs: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of DATA.

    Fields:
        messages: as `messages_of` makes them.
        tools: {"tools": ...} for the chat template, or {}.
    """

    messages: list[dict[str, Any]]
    tools: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateOptions:
    """The options of `sglang-dflash regenerate --help`."""

    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="JSONL of conversations; the assistant's turns are replaced.")
    ]
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="JSONL to write: messages, token ids, spans of the answers.")
    ]
    target: Annotated[str, typer.Option(help="Target: folder or hub name.")]
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 2048
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 64
    server_args: Annotated[str, typer.Option(help="More flags of sglang.launch_server, as one quoted string.")] = ""
    chat_template_kwargs: Annotated[str, typer.Option(help='JSON object, such as {"enable_thinking": false}.')] = "{}"
    synthesize: Annotated[
        int,
        typer.Option(help="First let the target write so many questions to DATA, a new file; 0: none."),
    ] = 0
    seed: Annotated[int, typer.Option(help="With --synthesize: seed of the questions.")] = 0
    opening: Annotated[
        str, typer.Option(help='With --synthesize: first words of every question, such as "Write a Python function".')
    ] = ""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value is not allowed.
        """
        template_kwargs(self.chat_template_kwargs)
        for name, value in (("--max-new-tokens", self.max_new_tokens), ("--concurrency", self.concurrency)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if self.temperature < 0:
            raise ValueError(f"--temperature is {self.temperature}; it must be 0 or more.")
        if self.synthesize < 0:
            raise ValueError(f"--synthesize is {self.synthesize}; it must be 0 or more.")
        if self.synthesize and not 0 <= self.seed < 1 << 30:
            raise ValueError(f"--seed is {self.seed}; it must be from 0 to {(1 << 30) - 1}.")
        if self.opening and not self.synthesize:
            raise ValueError(f"--opening is {self.opening}; it needs --synthesize.")
        if not self.synthesize and not self.data.is_file():
            raise ValueError(f"DATA is {self.data}; it must be an existing JSONL file.")


def regenerate(options: RegenerateOptions) -> None:
    """Replace every assistant turn of DATA by the target's own answer.

    With --synthesize, the target writes the questions to DATA first.

    Starts an SGLang server for the target. After an interruption, the same
    command goes on where it stopped.
    """
    template = json.dumps(dict(template_kwargs(options.chat_template_kwargs)), sort_keys=True)
    server_args = shlex.split(options.server_args)
    if options.synthesize:
        _write_questions(options, template, server_args)
    digest = hashlib.sha256(options.data.read_bytes()).hexdigest()
    asking = Asking(options.target, digest, options.max_new_tokens, options.temperature, template)
    Regeneration(options.data, options.output, asking).run(options.concurrency, server_args)


class Regeneration:
    """Makes one output file. Finished conversations are kept in `OUTPUT.partial` until all are finished."""

    def __init__(self, data: Path, output: Path, asking: Asking) -> None:
        """
        Raises:
            ValueError: DATA is not a JSONL of conversations, or OUTPUT was started with other data or options.
        """
        self.output, self.asking = output, asking
        self.partial = self.partial_of(output)
        self.conversations = _continued_by_none(_read_conversations(data))
        self.done = self._recover()
        self.renderer = Renderer(asking.target, json.loads(asking.chat_template_kwargs), "--target")

    @staticmethod
    def partial_of(output: Path) -> Path:
        """Where the answers are kept until all are there."""
        return output.with_name(output.name + ".partial")

    def _recover(self) -> dict[int, list[dict[str, Any]]]:
        """Conversations that are already answered: index -> samples."""
        made = self.output if self.output.is_file() else self.partial
        if not made.is_file():
            return {}
        lines = list(made.open(encoding="utf-8"))
        if made == self.output:
            side = self.output.with_name(self.output.name + ".asking.json")
            begun = json.loads(side.read_text(encoding="utf-8")) if side.is_file() else None
        elif not lines or not lines[0].endswith("\n"):
            return {}  # stopped before the first line was complete
        else:
            begun = json.loads(lines[0])
        if begun != asdict(self.asking):
            raise ValueError(f"{made} was made from other data or with other options; remove it or name another file.")
        if made == self.output:
            return {index: [] for index in self.conversations}
        # A line without a newline at its end is incomplete: the process stopped while it wrote it.
        rows = [json.loads(line) for line in lines[1:] if line.endswith("\n")]
        return {row["index"]: row["samples"] for row in rows}

    def run(self, concurrency: int, server_args: Sequence[str]) -> None:
        """Gets the missing answers, then writes the whole output."""
        console = Console(stderr=True)
        missing = [index for index in self.conversations if index not in self.done]
        if self.output.is_file():
            console.print(
                f"{self.output} already exists, made from the same data with the same options.", highlight=False
            )
            return
        self.output.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.partial.with_name(self.partial.name + ".fresh")
        with fresh.open("w", encoding="utf-8") as file:  # leaves out an incomplete line
            file.write(json.dumps(asdict(self.asking)) + "\n")
            for index, samples in self.done.items():
                file.write(json.dumps({"index": index, "samples": samples}) + "\n")
        fresh.rename(self.partial)
        if missing:
            self._ask(missing, concurrency, server_args, console)
        self._finish(console)

    def _ask(self, missing: list[int], concurrency: int, server_args: Sequence[str], console: Console) -> None:
        log = self.output.with_name(self.output.name + ".server.log")
        server = _started(self.asking.target, server_args, log, console)
        with server, ThreadPoolExecutor(concurrency) as pool, self.partial.open("a", encoding="utf-8") as file:
            client = server.client(timeout_s=_PATIENCE_S)
            asked = {index: self.conversations[index] for index in missing}
            waiting: dict[Future[list[dict[str, Any]]], int] = {}

            def keep(future: Future[list[dict[str, Any]]]) -> None:
                index, self.done[waiting[future]] = waiting[future], future.result()
                file.write(json.dumps({"index": index, "samples": self.done[index]}) + "\n")
                file.flush()

            def keep_finished() -> None:
                """Keeps the answers that came while another request failed or a signal came."""
                for future, index in waiting.items():
                    done = future.done() and not future.cancelled() and future.exception() is None
                    if done and index not in self.done:
                        keep(future)

            try:
                for index, one in asked.items():
                    waiting[pool.submit(self.answer, client, one.messages, one.tools)] = index
                with Progress(console).phase("Asking the target", len(missing)) as advance:
                    for future in as_completed(waiting):
                        keep(future)
                        advance()
            except httpx.HTTPError as error:
                raise _gone(error, log, "answers") from None
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                keep_finished()
                waiting.clear()  # the server's end cuts off the answers under way: they are none
                server.stop()
                raise
            finally:
                pool.shutdown(cancel_futures=True)
                keep_finished()

    def answer(
        self, client: Client, messages: Sequence[dict[str, Any]], tools: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Samples with the target's answers; a prompt that does not extend the last sample starts a new one.

        The history keeps a turn whose call has a result as it was logged: the result answers that call, whatever the
        target calls. If the target gives the same call, the next prompt extends the sample.
        """
        history: list[dict[str, Any]] = []
        samples: list[dict[str, Any]] = []
        turns = list(messages)
        if turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": ""})
        for turn, following in pairwise([*turns, {"role": ""}]):
            if turn["role"] != "assistant":
                history.append(turn)
                continue
            asked = self._ask_one(client, history, tools or {})
            if asked is None:
                break
            prompt, answer = asked
            said = {
                "role": "assistant",
                "content": self.renderer.tokenizer.decode(answer.ids, skip_special_tokens=True),
            }
            row = {"messages": [*history, said], **(tools or {})}
            span = [len(prompt), len(prompt) + len(answer.ids)]
            before = samples[-1]["input_ids"] if samples else None
            if before is not None and prompt[: len(before)] == before:
                spans = [*samples[-1]["spans"], span]
                samples[-1] = {**row, "input_ids": prompt + answer.ids, "spans": spans}
            else:
                samples.append({**row, "input_ids": prompt + answer.ids, "spans": [span]})
            called = following["role"] == "tool"
            if answer.finish_reason != "stop" and not called:
                break
            history.append(turn if called else said)
        return samples

    def _ask_one(
        self, client: Client, history: Sequence[dict[str, Any]], tools: Mapping[str, Any]
    ) -> tuple[list[int], Completion] | None:
        """The prompt's ids and the target's answer to it; None where the chat template or the server refuses."""
        try:
            prompt = self.renderer(history, {}, **tools)
        except ValueError:
            return None
        try:
            answer = client.generate(
                prompt, max_new_tokens=self.asking.max_new_tokens, temperature=self.asking.temperature
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 400:
                raise
            return None  # most likely longer than the context: the turns so far are kept
        return None if answer.finish_reason == "abort" else (prompt, answer)

    def _finish(self, console: Console) -> None:
        rows = [sample for index in sorted(self.done) for sample in self.done[index]]
        if not rows:
            self.partial.unlink()
            raise ValueError(f"All {len(self.done):,} conversations were refused, by the chat template or the server.")
        side = self.output.with_name(self.output.name + ".asking.json")
        side.write_text(json.dumps(asdict(self.asking)), encoding="utf-8")
        whole = self.partial.with_name(self.partial.name + ".whole")
        whole.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        whole.rename(self.output)
        self.partial.unlink()
        empty = sum(not samples for samples in self.done.values())
        console.print(
            f"{self.output}: {len(rows):,} samples of {len(self.done):,} conversations"
            + (f", {empty:,} refused by the chat template or the server." if empty else "."),
            highlight=False,
        )


def _started(target: str, server_args: Sequence[str], log: Path, console: Console) -> Server:
    server = Server(["--model-path", target, *device_flags(server_args), *server_args], log)
    with Progress(console).waiting(f"Starting {target} ...") as on_wait:
        server.start(START_S, on_wait)
    return server


def _gone(error: httpx.HTTPError, log: Path, kept: str) -> ServerError:
    return ServerError(
        f"The server stopped answering ({first_line(error)}); see {log}. The {kept} are kept: start again to go on."
    )


def _write_questions(options: RegenerateOptions, template: str, server_args: Sequence[str]) -> None:
    """Makes DATA of the target's own questions, or goes on with it."""
    console = Console(stderr=True)
    renderer = Renderer(options.target, json.loads(template), "--target")
    questions = Questions(options.data, Synthesis(options.target, template, options.seed, options.opening), renderer)
    if len(questions.keys) >= options.synthesize:
        return
    begun = [path for path in (options.output, Regeneration.partial_of(options.output)) if path.exists()]
    if begun:
        raise ValueError(
            f"--synthesize is {options.synthesize}, but {begun[0]} has the answers to the {len(questions.keys)} "
            f"questions of {options.data}; for more, name other files and another --seed."
        )
    log = options.data.with_name(options.data.name + ".server.log")
    seeded = ["--random-seed", str(questions.random_seed), *server_args]
    with _started(options.target, seeded, log, console) as server:
        client = server.client(timeout_s=_PATIENCE_S)
        try:
            questions.write(client, options.synthesize, options.concurrency, Progress(console))
        except httpx.HTTPError as error:
            raise _gone(error, log, "questions") from None


def _read_conversations(data: Path) -> list[Conversation]:
    def conversation(row: dict[str, Any], number: int) -> Conversation:
        if row.get("chat_template_kwargs"):
            raise ValueError("it has `chat_template_kwargs`; give --chat-template-kwargs, which holds for all lines.")
        if "turns" not in row:
            return Conversation(messages_of(row), tools_of(row))
        asked = [as_openai(turn.messages) for turn in session_of(row, number).turns]
        messages = [message for turn in asked for message in (*turn, {"role": "assistant", "content": ""})]
        return Conversation(messages, tools_of(row))

    conversations = list(read_rows(data, "DATA", conversation))
    if not conversations:
        raise ValueError(f"DATA {data} holds no conversation.")
    return conversations


def _continued_by_none(conversations: Sequence[Conversation]) -> dict[int, Conversation]:
    """By index, without those that another line goes on with: a log may have one line per request of a session."""
    keys = [(json.dumps(one.tools), *map(json.dumps, one.messages)) for one in conversations]
    # Equal lines all stay: at a temperature, each gets an answer of its own.
    return {index: conversations[index] for index, holder in enumerate(holders(keys)) if keys[index] == keys[holder]}

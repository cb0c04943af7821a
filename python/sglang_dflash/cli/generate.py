"""`sglang-dflash generate`: one answer of a pair without a server, in transformers or MLX."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_dflash.cli.engines import ENGINES, Engine, Put
from sglang_dflash.core.draft_config import DTYPES
from sglang_dflash.doctor.checkpoints import open_checkpoint
from sglang_dflash.serving import TiePolicy, differs_at
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.training.options import template_kwargs

WARM_UP_TOKENS = 4
_models = partial(typer.Option, rich_help_panel="Models")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The options of `sglang-dflash generate --help`."""

    prompt: Annotated[str, typer.Argument(help="What the user says; it gets the target's chat template.")]
    model_path: Annotated[str, _models(help="Target: folder or hub name.")]
    draft: Annotated[str, _models(help="The target's DFlash draft: folder or hub name.")]
    engine: Annotated[str, _models(help=f"One of {', '.join(ENGINES)}.")] = "transformers"
    dtype: Annotated[
        str | None,
        _models(help=f"One of {', '.join(DTYPES)}. Default: float32 on a CPU, else as the checkpoint says."),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens of the answer.")] = 256
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    chat_template_kwargs: Annotated[
        tuple[tuple[str, Any], ...],
        typer.Option(help='JSON object, such as {"enable_thinking": false}.'),
        template_kwargs,
    ] = ()
    compare: Annotated[
        bool, typer.Option("--compare", help="Also answer without drafts, and compare tokens and speed.")
    ] = False
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the answer and its numbers to this file.")] = (
        None
    )

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value is not allowed.
        """
        for name, value, allowed in (("--engine", self.engine, ENGINES), ("--dtype", self.dtype, (*DTYPES, None))):
            if value not in allowed:
                raise ValueError(f"{name} is {value}; choose from {', '.join(filter(None, allowed))}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens is {self.max_new_tokens}; it must be at least 1.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature is {self.temperature}; it must be 0 (greedy) or above.")
        if self.compare and self.temperature:
            raise ValueError(
                f"--compare is given and --temperature is {self.temperature}; only greedy answers compare."
            )


@dataclass(slots=True)
class Answer:
    """One answer as it came.

    Fields:
        ids: the end token included.
        first_s, decode_s: seconds to the first token, and from there to the last.
        commit_lens: of every step; empty without drafts.
    """

    ids: list[int]
    first_s: float
    decode_s: float
    commit_lens: list[int]

    @property
    def tok_s(self) -> float | None:
        """Tokens per second after the first; None if there is only one."""
        return (len(self.ids) - 1) / self.decode_s if len(self.ids) > 1 else None

    @property
    def tau(self) -> float | None:
        """Mean commit_len; None without a step."""
        return sum(self.commit_lens) / len(self.commit_lens) if self.commit_lens else None

    def report(self) -> dict[str, Any]:
        numbers = {"first_s": self.first_s, "decode_s": self.decode_s, "tok_s": self.tok_s, "tau": self.tau}
        return {"ids": self.ids, "commit_lens": self.commit_lens, **numbers}


def generate(options: GenerateOptions) -> int:
    """Answer one prompt with a pair in this process, without a server.

    Standard output holds the answer alone, as it is made; its numbers go to
    standard error. Exit codes: 0 answered, 1 --compare found another answer,
    2 there is no answer, 130 Ctrl-C, 143 SIGTERM.
    """
    from transformers import TextStreamer

    for flag, name in (("--model-path", options.model_path), ("--draft", options.draft)):
        open_checkpoint(name, flag)
    renderer = Renderer(options.model_path, dict(options.chat_template_kwargs), "--model-path")
    prompt = renderer([{"role": "user", "content": options.prompt}], {})
    engine = ENGINES[options.engine](options.model_path, options.draft, renderer.tokenizer, options.dtype)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    speculate = partial(engine.speculate, prompt, options.max_new_tokens, options.temperature)
    plain = partial(engine.plain, prompt, options.max_new_tokens)
    if options.compare:  # else the arm that runs first would pay for what is done once
        engine.speculate(prompt, WARM_UP_TOKENS, 0.0, lambda ids: None)
        engine.plain(prompt, WARM_UP_TOKENS, lambda ids: None)
    printer = TextStreamer(renderer.tokenizer, skip_special_tokens=True)
    answer = timed(speculate, printer)
    printer.end()
    console.print(f"{len(answer.ids)} tokens, {speed(answer)}{drafted(answer)}; {engine.dtype} on {engine.device}")
    report = {"engine": options.engine, "model_path": options.model_path, "draft": options.draft}
    report |= {"dtype": engine.dtype, "device": engine.device, "prompt_tokens": len(prompt)}
    report |= {"text": renderer.tokenizer.decode(answer.ids, skip_special_tokens=True), **answer.report()}
    same = True
    if options.compare:
        alone = timed(plain)
        judged, same = compared(engine, prompt, answer, alone)
        report["plain"] = {**alone.report(), **judged}
        ratio = f"; with drafts {answer.tok_s / alone.tok_s:.2f} times as fast" if answer.tok_s and alone.tok_s else ""
        console.print(f"without drafts: {judged['verdict']}; {speed(alone)}{ratio}")
    if options.json_file is not None:
        options.json_file.parent.mkdir(parents=True, exist_ok=True)
        options.json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if same else 1


def timed(run: Callable[[Put], list[int] | None], printer: Any = None) -> Answer:
    """Runs an engine and records what it commits, and when.

    Args:
        printer: a streamer of transformers, which shows the answer.
    """
    import numpy as np

    ids: list[int] = []
    times = [time.perf_counter()]

    def put(new: list[int]) -> None:
        times.append(time.perf_counter())
        ids.extend(new)
        if printer is not None:
            printer.put(np.array(new))

    commit_lens = run(put) or []
    return Answer(ids, times[1] - times[0], times[-1] - times[1], commit_lens)


def compared(engine: Engine, prompt: list[int], answer: Answer, alone: Answer) -> tuple[dict[str, Any], bool]:
    """What the answers have in common, and whether they are the same but for a tie."""
    if answer.ids == alone.ids:
        return {"verdict": "the same answer"}, True
    index = differs_at(answer.ids, alone.ids)
    gap = engine.gap([*prompt, *alone.ids[:index]])
    tie = TiePolicy.of(engine.dtype).excuses(gap)
    verdict = f"another answer from token {index} on, where the two best logits {'tie' if tie else 'do not tie'}"
    return {"verdict": f"{verdict} ({gap:.1e} apart)", "index": index, "gap": gap, "tie": tie}, tie


def speed(answer: Answer) -> str:
    after = f", then {answer.tok_s:.1f} tokens/s" if answer.tok_s else ""
    return f"the first after {answer.first_s:.2f} s{after}"


def drafted(answer: Answer) -> str:
    return f", tau {answer.tau:.2f} over {len(answer.commit_lens)} steps" if answer.tau else ""

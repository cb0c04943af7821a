"""Recurrent state under memory pressure: growing sessions that do not fit evict each other's states.

SGLang issue 36537 reports wrong answers under `extra_buffer` once cached states are evicted. Here, every answer equals
that of speculation off, under each strategy. The busier the machine, the fewer or more requests are retracted, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from equality import ask_off, assert_equal_tokens
from preloaded import PreloadedServer
from sglang_dflash.serving import (
    PAIRS,
    TINY_ENVIRONMENT,
    TINY_OVERLAPPING,
    Client,
    Completion,
    held_out_prompts_in_turn,
)

pytestmark = [pytest.mark.server, pytest.mark.families]
TARGET, DRAFT = PAIRS["hybrid"]
MODEL = ["--device", "cpu", "--dtype", "float32", "--model-path", str(TARGET), "--max-running-requests", "8"]
# Eight sessions of up to 600 tokens do not fit, and nothing holds them back.
POOL = ["--max-total-tokens", "1300", "--schedule-conservativeness", "0.05", "--mamba-track-interval", "64"]
ADMIT_ALL = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
SESSIONS, TURNS, NEW_TOKENS = 20, 5, 60
# Strategy -> further flags; the environment; the largest share of states in use that the strategy shows.
STRATEGIES: dict[str, tuple[list[str], dict[str, str], float]] = {
    "extra_buffer": (["--max-mamba-cache-size", "26"], TINY_OVERLAPPING, 0.6),
    "extra_buffer_lazy": (["--max-mamba-cache-size", "18"], TINY_OVERLAPPING, 0.6),
    "no_buffer": (["--max-mamba-cache-size", "16"], TINY_ENVIRONMENT, 0.5),
}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[tuple[list[int], Completion]]]]:
    """Of each session, each turn's whole prompt and its answer."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    questions = [each.prompt for each in held_out_prompts_in_turn()]
    flags = [*MODEL, "--max-mamba-cache-size", "16", "--disable-overlap-schedule", "--disable-radix-cache"]
    log = tmp_path_factory.mktemp("off") / "off.log"
    with PreloadedServer([*flags, "--max-total-tokens", "8192"], log, TINY_ENVIRONMENT) as server:
        client = server.client()

        def turns(session: int) -> list[tuple[list[int], Completion]]:
            told: list[tuple[list[int], Completion]] = []
            for turn in range(TURNS):
                question = questions[(session * 7 + turn * 13) % len(questions)]
                words = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                before = told[-1][0] + told[-1][1].ids if told else []
                prompt = before + tokenizer.encode(words)
                told.append((prompt, ask_off(client, prompt, max_new_tokens=NEW_TOKENS)))
            return told

        yield [turns(session) for session in range(SESSIONS)]


def _tell(client: Client, session: list[tuple[list[int], Completion]]) -> list[Completion]:
    return [client.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt, _ in session]


def _run(strategy: str, sessions: Any, log: Path) -> None:
    places, environment, share = STRATEGIES[strategy]
    flags = [*MODEL, *POOL, *places, "--mamba-radix-cache-strategy", strategy]
    flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFT)]
    with (
        PreloadedServer(flags, log, environment | ADMIT_ALL) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        client = server.client()
        told = list(pool.map(lambda session: _tell(client, session), sessions))
    answers = [answer for session in told for answer in session]
    asked = [turn for session in sessions for turn in session]
    assert_equal_tokens(answers, [expected for _, expected in asked], [len(prompt) for prompt, _ in asked])
    used = [float(number) for number in re.findall(r"mamba usage: ([0-9.]+)", log.read_text())]
    assert max(used) > share, "the states were never scarce"
    later = [
        (answer.cached_tokens, len(before[0]))
        for session, session_told in zip(sessions, told, strict=True)
        for before, answer in zip(session, session_told[1:], strict=False)
    ]
    assert sum(cached > 0 for cached, _ in later) > len(later) / 8, "no prefix was hit"
    assert any(cached < known - 64 for cached, known in later), "nothing was evicted"


def test_the_default_under_overlap(sessions: Any, tmp_path: Path) -> None:
    """Fails where a state that was evicted, overwritten or lost by a retraction reaches an answer."""
    _run("extra_buffer", sessions, tmp_path / "on.log")


@pytest.mark.parametrize("strategy", ["extra_buffer_lazy", "no_buffer"])
def test_other_strategies(sessions: Any, tmp_path: Path, strategy: str) -> None:
    """The same under the other strategies."""
    _run(strategy, sessions, tmp_path / "on.log")

"""What the off arms of the embedded pair answer, asked once in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from arms import (
    MAX_NEW_TOKENS,
    OPENINGS,
    PENALTIES,
    PLAIN,
    POOL,
    REGEX,
    TINY_POOL,
    Baseline,
    pick,
    to_the_limit,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from equality import ask_off
from once import once
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_TARGET, Client, Completion, held_out_prompts

PER_KIND = 16
TURNS = 5


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY_TARGET)


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="session")
def baseline(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    return once("baseline", tmp_path_factory, lambda: _ask_off_arms(tokenizer, tmp_path_factory.mktemp("off")))


def _ask_off_arms(tokenizer: PreTrainedTokenizerBase, logs: Path) -> Baseline:
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": p.prompt}]) for p in pick(held_out_prompts(), PER_KIND)]
    with PreloadedServer([*PLAIN, *POOL], logs / "off.log", TINY_ENVIRONMENT) as server:
        client = server.client()
        answers = [ask_off(client, ids, max_new_tokens=MAX_NEW_TOKENS) for ids in prompts]
        conversation = _converse(client, tokenizer)
    long_prompts = [tokenizer(text)["input_ids"] for text in OPENINGS]
    # Page size 16, to cover speculation off at both page sizes; no overlap, so that penalties are exact.
    tiny = [*PLAIN, *TINY_POOL, "--page-size", "16", "--disable-overlap-schedule"]
    with PreloadedServer(tiny, logs / "off-tiny.log", TINY_ENVIRONMENT) as server:
        client = server.client()
        long_answers = [ask_off(client, ids, **to_the_limit(ids)) for ids in long_prompts]
        penalised_answers = [ask_off(client, ids, **to_the_limit(ids), **PENALTIES) for ids in long_prompts]
        regex_answers = [ask_off(client, ids, **REGEX) for ids in long_prompts[:3]]
        for ids, answer in list(zip(prompts, answers, strict=True))[:6]:
            again = ask_off(client, ids, max_new_tokens=MAX_NEW_TOKENS)
            assert again.ids == answer.ids[: len(again.ids)], "page size 16 changed an answer with speculation off"
    return Baseline(
        prompts,
        answers,
        long_prompts,
        long_answers,
        penalised_answers,
        regex_answers,
        conversation,
    )


def _converse(client: Client, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], Completion]]:
    questions = [prompt.prompt for prompt in held_out_prompts("arithmetic")[:TURNS]]
    messages: list[dict[str, str]] = []
    turns = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        ids = chat_ids(tokenizer, messages)
        answer = ask_off(client, ids, max_new_tokens=MAX_NEW_TOKENS)
        turns.append((ids, answer))
        messages.append({"role": "assistant", "content": tokenizer.decode(answer.ids, skip_special_tokens=True)})
    return turns

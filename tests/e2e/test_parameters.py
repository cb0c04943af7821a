"""With every parameter, DFLASH's answer equals what the request gets alone with speculation off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from arms import EVERY_WIDTH, FULL, PLAIN, POOL, SPECULATE, pick
from baseline import chat_ids
from transformers import PreTrainedTokenizerBase

from parameters import (
    BODIES,
    COMBINATIONS,
    GREEDY,
    MASKS,
    MAX_NEW_TOKENS,
    SAMPLED,
    Request,
    ask,
    ask_oracle,
    assert_alike,
    assert_close,
    combinations,
    draw,
    mean_commit_len,
    openai_answer,
    openai_requests,
    processor_body,
    requests_of,
)
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_OVERLAPPING, Client, held_out_prompts

pytestmark = pytest.mark.server

FLAGS = ["--enable-return-hidden-states", "--enable-custom-logit-processor", "--tool-call-parser", "qwen"]
OPENAI = openai_requests(held_out_prompts("chat")[7].prompt)
ORACLE = [*PLAIN, *POOL, "--disable-overlap-schedule"]
SEEDED = ["--enable-deterministic-inference"]
SEEDED_GROUP = pytest.mark.xdist_group("seeded")  # other servers than the greedy tests have


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests, and their answers alone with speculation off."""

    single: list[Request]
    single_answers: list[Any]
    drawn: list[Request]
    drawn_answers: list[Any]
    openai: dict[str, Any]


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """One of each kind; the last two are chat, whose drafts are rejected most."""
    chosen = [*pick(held_out_prompts(), 1), *held_out_prompts("chat")[5:6]]
    return [chat_ids(tokenizer, [{"role": "user", "content": prompt.prompt}]) for prompt in chosen]


def asked(arguments: list[str], log: Any, single: list[Request], drawn: list[Request]) -> Asked:
    with PreloadedServer(arguments, log, TINY_ENVIRONMENT) as server:
        client = server.client()
        openai = {name: openai_answer(client, request) for name, request in OPENAI.items()}
        return Asked(single, ask_oracle(client, single), drawn, ask_oracle(client, drawn), openai)


@pytest.fixture(scope="module")
def greedy(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Asked:
    processor = Request("processor", prompts[0], {"custom_params": {"window": 3}}, processor_body())
    bodies = [
        Request(name, prompt, {"frequency_penalty": 0.8}, body) for name, body in BODIES.items() for prompt in prompts
    ]
    mixes = [Request(f"mix {i}", prompts[i % 4], values) for i, values in enumerate(draw(combinations(), COMBINATIONS))]
    log = tmp_path_factory.mktemp("parameters") / "off.log"
    return asked([*ORACLE, *FLAGS], log, [*requests_of(GREEDY, prompts), *bodies, processor], mixes)


WIDTHS = [pytest.param(EVERY_WIDTH, id="every width"), pytest.param(FULL, id="whole blocks", marks=pytest.mark.matrix)]


@pytest.fixture(scope="module", params=WIDTHS)
def greedy_client(
    request: pytest.FixtureRequest, greedy: Asked, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A server that takes every width in turn, from plain decoding to the whole block. Or one of whole blocks."""
    log = tmp_path_factory.mktemp("parameters") / "on.log"
    with PreloadedServer([*PLAIN, *POOL, *SPECULATE, *FLAGS], log, TINY_OVERLAPPING | request.param) as server:
        yield server.client()


def report(arm: str, answers: list[Any]) -> float:
    tau = mean_commit_len(answers)
    print(f"{arm}: {len(answers)} requests, tau {tau:.2f}")
    return tau


@pytest.mark.parametrize("concurrency", [1, 8])
def test_each_parameter_of_a_greedy_request(greedy_client: Client, greedy: Asked, concurrency: int) -> None:
    """Fails where a parameter is ignored, applied to the wrong row, or changes another request."""
    answers = ask(greedy_client, greedy.single, concurrency)
    assert_alike(greedy.single, greedy.single_answers, answers)
    assert report(f"each parameter, greedy, {concurrency} at a time", answers) > 1.5


def test_drawn_combinations_of_greedy_requests(greedy_client: Client, greedy: Asked) -> None:
    """Fails where parameters that are right alone are wrong together, or in one batch of eight."""
    answers = ask(greedy_client, greedy.drawn, 8)
    assert_alike(greedy.drawn, greedy.drawn_answers, answers)
    assert report("combinations, greedy", answers) > 1.2


def test_parameters_change_the_answers(greedy: Asked, prompts: list[list[int]]) -> None:
    """Fails where a parameter above does not change this pair's answers, so that its case tests nothing."""
    plain = {
        tuple(r.prompt): a["output_ids"]
        for r, a in zip(greedy.single, greedy.single_answers, strict=True)
        if r.name == "plain"
    }
    same_by_design = {"plain", "top_k, top_p, min_p beside temperature 0", "skip_special_tokens", "n", "structural_tag"}
    for name in GREEDY.keys() - same_by_design:
        of_case = [(r, a) for r, a in zip(greedy.single, greedy.single_answers, strict=True) if r.name == name]
        assert any(answer["output_ids"] != plain[tuple(request.prompt)] for request, answer in of_case), name


@pytest.mark.parametrize("name", OPENAI)
def test_openai_fields(greedy_client: Client, greedy: Asked, name: str) -> None:
    """Fails where a field of a chat or completion answer differs from speculation off."""
    assert_close(greedy.openai[name], openai_answer(greedy_client, OPENAI[name]), name)


def test_streamed_answer(greedy_client: Client, greedy: Asked) -> None:
    """Fails where the chunks of a stream do not add up to the answer in one piece."""
    request = next(r for r in greedy.single if r.name == "all penalties")
    expected = greedy.single_answers[greedy.single.index(request)]
    sampling = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "stream_interval": 5, **request.sampling}
    body = {"input_ids": request.prompt, "sampling_params": sampling, "stream": True}
    lines = greedy_client.post("/generate", body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["text"] == expected["text"] and len(chunks) > 2


@pytest.fixture(scope="module")
def seeded(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Asked:
    single = [
        Request(r.name, r.prompt, r.sampling | {"sampling_seed": 7 + i})
        for i, r in enumerate(requests_of(SAMPLED, prompts))
    ]
    single += [
        Request(name, prompt, sampling | {"sampling_seed": 3}, body)
        for name, (sampling, body) in MASKS.items()
        for prompt in prompts
    ]
    drawn = [
        Request(f"mix {i}", prompts[i % 4], {"temperature": 0.3 + 0.05 * i, "sampling_seed": i, **values})
        for i, values in enumerate(draw(combinations(), COMBINATIONS))
    ]
    log = tmp_path_factory.mktemp("seeded") / "off.log"
    return asked([*ORACLE, *SEEDED], log, single, drawn)


@pytest.fixture(scope="module")
def seeded_client(seeded: Asked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Takes every width in turn: a seeded token depends on its position only, however the last step ended."""
    log = tmp_path_factory.mktemp("seeded") / "on.log"
    with PreloadedServer([*PLAIN, *POOL, *SPECULATE, *SEEDED], log, TINY_ENVIRONMENT | EVERY_WIDTH) as server:
        yield server.client()


@SEEDED_GROUP
@pytest.mark.parametrize("concurrency", [1, 8])
def test_each_parameter_of_a_seeded_request(seeded_client: Client, seeded: Asked, concurrency: int) -> None:
    """Fails where a sampled token depends on anything but its request, its seed and its position."""
    answers = ask(seeded_client, seeded.single, concurrency)
    assert_alike(seeded.single, seeded.single_answers, answers)
    assert report(f"each parameter, seeded, {concurrency} at a time", answers) > 1.2


@SEEDED_GROUP
def test_drawn_combinations_of_seeded_requests(seeded_client: Client, seeded: Asked) -> None:
    """Fails as above, for combined parameters and eight requests in a batch."""
    answers = ask(seeded_client, seeded.drawn, 8)
    assert_alike(seeded.drawn, seeded.drawn_answers, answers)
    assert report("combinations, seeded", answers) > 1.1


@SEEDED_GROUP
def test_another_seed_is_another_answer(seeded_client: Client, prompts: list[list[int]]) -> None:
    """Fails where the seed is ignored."""
    texts = {
        Request("seed", prompts[-1], {"temperature": 2.0, "sampling_seed": i}).send(seeded_client)["text"]
        for i in range(6)
    }
    assert len(texts) > 3

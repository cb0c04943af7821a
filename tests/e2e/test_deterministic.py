"""With --enable-deterministic-inference a request gets the same bits alone and beside any others, on a plain CPU.

`off` holds what speculation off answers; an arm with speculation compares its own answers with `off.alone`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from arms import ADMIT_ALL, OPENINGS, PLAIN, POOL, to_the_limit
from transformers import GenerationConfig, PreTrainedTokenizerBase

from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, TINY_TARGET, Client, Completion, held_out_prompts

pytestmark = pytest.mark.server
DETERMINISTIC = [*PLAIN, "--enable-deterministic-inference"]
CONCURRENCY = 8
MAX_NEW_TOKENS = 32
# Holds the longest of these requests, and not eight at once.
SMALL_POOL = ["--max-total-tokens", "900", "--max-running-requests", "8", "--schedule-conservativeness", "0.05"]

# Every path of the sampler; neighbours in a batch differ.
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "sampling_seed": 7},
    {"temperature": 0.8, "sampling_seed": 8, "top_p": 0.8},
    {"temperature": 1.2, "sampling_seed": 2**40 + 9, "top_k": 20},
    {"temperature": 1.0, "sampling_seed": 10, "min_p": 0.05},
    {"temperature": 0.9, "sampling_seed": 11, "top_p": 0.95, "top_k": 50, "min_p": 0.02},
    {"temperature": 1.0},
    {"temperature": 1.3, "sampling_seed": 12, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"temperature": 0.0, "top_p": 0.5, "min_p": 0.3},
]


@dataclass(frozen=True, slots=True)
class Off:
    """What speculation off answers: to each request alone, and otherwise.

    Fields:
        requests: prompts and sampling parameters.
        repeated: alone once more, the prompt in the radix cache.
        crowded: eight at a time. chunked: eight at a time, in other chunks and pages.
        long_requests, long_alone, long_crowded: to the end of a small context, alone and in a pool that runs out.
        by_seed: ids of one prompt with seeds 0 to 7, and with these once more.
        without_seed, with_default_seed: ids of it without a seed, and with 42, which the host then takes.
    """

    requests: list[tuple[list[int], dict[str, Any]]]
    alone: list[Completion]
    repeated: list[Completion]
    crowded: list[Completion]
    chunked: list[Completion]
    long_requests: list[tuple[list[int], dict[str, Any]]]
    long_alone: list[Completion]
    long_crowded: list[Completion]
    by_seed: list[tuple[int, ...]]
    without_seed: tuple[int, ...]
    with_default_seed: tuple[int, ...]


def ask_all(client: Client, requests: Sequence[tuple[list[int], dict[str, Any]]], concurrency: int) -> list[Completion]:
    """The answers, with the logprobs of their tokens to the last bit."""
    bodies = [{"input_ids": ids, "sampling_params": sampling, "return_logprob": True} for ids, sampling in requests]
    answers = client.ask_all(bodies, concurrency)
    assert all(answer.answered for answer in answers)
    return answers


def sampled(client: Client, prompt: list[int], **sampling: Any) -> tuple[int, ...]:
    return tuple(client.generate(prompt, temperature=2.0, max_new_tokens=16, **sampling).ids)


@pytest.fixture(scope="module")
def off(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Off:
    logs = tmp_path_factory.mktemp("deterministic")
    source = tokenizer(Path(__file__).read_text())["input_ids"]
    prompts = [tokenizer(p.prompt)["input_ids"] for p in held_out_prompts()[::9]][:14]
    prompts += [source[: 512 + i] for i in (-20, -1, 0, 1)]  # about a key block of the attention
    requests = [
        (ids, {"max_new_tokens": MAX_NEW_TOKENS, **SAMPLINGS[i % len(SAMPLINGS)]}) for i, ids in enumerate(prompts)
    ]
    # Without penalties: the host loses their counts at a retraction. Without end tokens, so that the pool runs out.
    no_end = {str(one): -100.0 for one in GenerationConfig.from_pretrained(TINY_TARGET).eos_token_id}
    samplings = [sampling for sampling in SAMPLINGS if "repetition_penalty" not in sampling]
    long_requests = [
        (ids, {**to_the_limit(ids), **samplings[i % len(samplings)], "logit_bias": no_end})
        for i, ids in enumerate(tokenizer(text)["input_ids"] for text in OPENINGS[:8])
    ]
    with PreloadedServer([*DETERMINISTIC, *POOL], logs / "off.log", TINY_ENVIRONMENT) as server:
        client = server.client()
        alone, repeated = ask_all(client, requests, 1), ask_all(client, requests, 1)
        crowded = ask_all(client, requests, CONCURRENCY)
        by_seed = [sampled(client, prompts[0], sampling_seed=seed) for seed in [*range(8), *range(8)]]
        seeds = (sampled(client, prompts[0]), sampled(client, prompts[0], sampling_seed=42))
    small = [*SMALL_POOL, "--chunked-prefill-size", "48", "--page-size", "16"]
    with PreloadedServer([*DETERMINISTIC, *small], logs / "small.log", TINY_ENVIRONMENT | ADMIT_ALL) as server:
        client = server.client()
        chunked = ask_all(client, requests, CONCURRENCY)
        long_alone, long_crowded = ask_all(client, long_requests, 1), ask_all(client, long_requests, CONCURRENCY)
    return Off(requests, alone, repeated, crowded, chunked, long_requests, long_alone, long_crowded, by_seed, *seeds)


def assert_same(
    replies: Sequence[Completion], alone: Sequence[Completion], requests: Sequence[tuple[list[int], Any]]
) -> None:
    """Fails where a token or a bit of a logprob differs from the request alone."""
    for reply, expected, (_, sampling) in zip(replies, alone, requests, strict=True):
        assert reply.ids == expected.ids, sampling
        assert reply.logprobs == expected.logprobs, sampling


def test_a_batch_changes_nothing(off: Off) -> None:
    """Fails where a row of a linear layer, a norm, an attention or the sampler depends on its batch.

    Without the flag, half of these answers differ.
    """
    assert_same(off.crowded, off.alone, off.requests)


def test_prefill_and_decode_agree(off: Off) -> None:
    """Fails where recomputed or cached keys differ from decoded ones, or a chunk's length changes a bit."""
    assert sum(reply.cached_tokens for reply in off.repeated) > 0, "the radix cache is off"
    assert_same(off.repeated, off.alone, off.requests)
    assert_same(off.chunked, off.alone, off.requests)


def test_a_retraction_changes_nothing(off: Off) -> None:
    """Fails where a retracted request, prefilled again with its emitted tokens, continues differently."""
    assert sum(reply.meta["num_retractions"] for reply in off.long_crowded) > 0, "nothing was retracted"
    assert_same(off.long_crowded, off.long_alone, off.long_requests)


def test_seeds_are_honoured(off: Off) -> None:
    """Fails where a seed is ignored or not reproducible, or all seeds give one answer."""
    assert off.by_seed[:8] == off.by_seed[8:], "the same seeds twice"
    assert len(set(off.by_seed)) >= 6
    assert off.without_seed == off.with_default_seed

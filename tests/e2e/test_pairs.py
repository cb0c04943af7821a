"""A prefill server and a decode server answer as one: same tokens, and same steps, in every draft."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from arms import (
    ADMIT_ALL,
    PENALTIES,
    PLAIN,
    POISONED,
    REGEX,
    SPECULATE,
    TINY_POOL,
    Baseline,
    assert_same_steps,
    to_the_limit,
)
from kept_steps import steps_until
from reference_pair import ReferencePair
from test_lifecycle import assert_pool_empties, crowd_the_pool
from two_servers import Pair, need_mooncake, running_pair

from equality import assert_equal_tokens
from sglang_dflash.serving import TINY_OVERLAPPING, Completion

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("pair")]


@pytest.fixture(scope="module")
def pair(baseline: Baseline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    need_mooncake()
    flags = [*PLAIN, *SPECULATE, *TINY_POOL, "--page-size", "16", "--chunked-prefill-size", "64"]
    environment = TINY_OVERLAPPING | ADMIT_ALL | POISONED
    with running_pair(flags, tmp_path_factory.mktemp("pair"), environment) as running:
        yield running


def assert_plain_steps(oracle: ReferencePair, prompts: list[list[int]], answers: list[Completion]) -> None:
    """Fails where a request's tokens or steps differ from the reference's. A retracted request goes on as it was."""
    longest = max(len(answer.ids) for answer in answers)
    for answer, alone in zip(answers, oracle.generate(prompts, longest), strict=True):
        assert answer.ids == alone.ids[: len(answer.ids)]
        assert_same_steps(answer, steps_until(alone.commit_lens, len(answer.ids)))


def test_prefill_and_decode_on_two_servers(pair: Pair, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where KV of either model arrives changed or not at all: of short prompts, of prompts in chunks, and of
    those whose beginning the prefill server has cached."""
    client, (long, _) = pair.client, baseline.conversation[-3]
    prompts = [*baseline.prompts[::6], long[:200]]
    for _ in range(2):
        assert_plain_steps(oracle, prompts, client.generate_all(prompts, 4, max_new_tokens=50))
    assert_pool_empties(client)


def test_parameters_on_two_servers(pair: Pair, baseline: Baseline) -> None:
    """Fails where a request that arrives has no penalty counts, or those of another, or where its grammar lacks the
    first token."""
    client, prompts = pair.client, baseline.long_prompts
    with ThreadPoolExecutor(8) as pool:
        sampling = [{**PENALTIES, **to_the_limit(prompt)} for prompt in prompts]
        asked = [pool.submit(client.generate, prompt, **each) for prompt, each in zip(prompts, sampling, strict=True)]
        asked += [pool.submit(client.generate, prompt, **REGEX) for prompt in prompts[:3]]
        answers = [future.result() for future in asked]
    assert_equal_tokens(answers, [*baseline.penalised_answers, *baseline.regex_answers], [*prompts, *prompts[:3]])


def test_retraction_on_a_decode_server(pair: Pair, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where a backup of a retracted request lacks the draft's KV, or its last tokens."""

    def run_on(prompt: list[int]) -> Completion:
        return pair.client.generate(prompt, **to_the_limit(prompt))

    crowd = crowd_the_pool(run_on, baseline.long_prompts, baseline.long_answers)
    assert_plain_steps(oracle, baseline.long_prompts, crowd)
    assert_pool_empties(pair.client)

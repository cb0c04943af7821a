"""The server commits the same ids in the same steps as a plain-torch DFlash loop."""

from __future__ import annotations

import json
from itertools import accumulate

import httpx
import pytest
from arms import MAX_NEW_TOKENS, Baseline, assert_same_steps, on_arms, tau
from oracle import Oracle

from sglang_dflash.serving import Client

pytestmark = pytest.mark.server


def streamed_lengths(client: Client, prompt: list[int]) -> list[int]:
    """Length of the answer after every streamed chunk: each is where one or more steps ended."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
        "stream": True,
    }
    lengths = []
    with httpx.stream("POST", f"{client.url}/generate", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                lengths.append(json.loads(line.removeprefix("data: "))["meta_info"]["completion_tokens"])
    return lengths


@on_arms("default")
def test_same_ids_in_the_same_steps(client: Client, baseline: Baseline, oracle: Oracle) -> None:
    """Fails where taps, context, positions, masks or acceptance differ from the paper's loop in any step."""
    prompts = baseline.prompts[::6]
    answers = [client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = oracle.generate(prompt, MAX_NEW_TOKENS)
        assert answer.ids == expected.ids
        assert_same_steps(answer, expected.commit_lens)
        # Chunks may hold several steps where the client reads late, but none ends within a step.
        ends = {min(1 + length, len(answer.ids)) for length in accumulate([0, *expected.commit_lens])}
        assert set(streamed_lengths(client, prompt)) <= ends
    assert tau(answers) > 2.0

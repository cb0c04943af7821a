"""The server commits the same ids in the same steps as the package's reference."""

from __future__ import annotations

import json
from itertools import accumulate

import httpx
import pytest
from arms import MAX_NEW_TOKENS, Baseline, assert_same_steps, on_arms
from reference_pair import ReferencePair

from equality import tau
from sglang_dflash.serving import Client

pytestmark = pytest.mark.server


def streamed_lengths(client: Client, prompt: list[int]) -> list[int]:
    """Lengths of the answer after every streamed chunk; each chunk ends where a step ends."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
        "stream": True,
    }
    lengths = []
    with httpx.stream("POST", f"{client.url}/generate", json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                lengths.append(json.loads(line.removeprefix("data: "))["meta_info"]["completion_tokens"])
    return lengths


@on_arms("overlap")
def test_same_ids_in_the_same_steps(client: Client, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where taps, context, positions, masks or acceptance differ from the reference in any step, for any kind
    of prompt."""
    answers = [client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in baseline.prompts]
    for answer, expected in zip(answers, oracle.generate(baseline.prompts, MAX_NEW_TOKENS), strict=True):
        assert answer.ids == expected.ids
        assert_same_steps(answer, expected.commit_lens)
    assert tau(answers) > 2.0


@on_arms("overlap")
def test_chunks_end_where_steps_end(client: Client, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where the server commits as many steps as the reference, but in another order."""
    prompts = baseline.prompts[::6]
    for prompt, expected in zip(prompts, oracle.generate(prompts, MAX_NEW_TOKENS), strict=True):
        # If the client reads late, a chunk may hold several steps, but none ends within a step.
        ends = {min(1 + length, len(expected.ids)) for length in accumulate([0, *expected.commit_lens])}
        lengths = streamed_lengths(client, prompt)
        assert lengths[-1] == len(expected.ids)
        assert set(lengths) <= ends

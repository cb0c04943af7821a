"""What a request gets alone with speculation off, and the rule for when tokens count as equal to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dflash.serving import Answer, Client

BLOCK_SIZE = 8  # of every draft in the tests with servers
TIE_GAP = 1e-5  # top-2 logit gap below which float32 may order two tokens either way
TOKENS_PER_TIE = 10_000


@dataclass(frozen=True, slots=True)
class OffAnswer:
    """What a request gets alone with speculation off.

    Fields:
        gaps: per token, the distance between the two best logits.
    """

    ids: list[int]
    finish_reason: str
    gaps: list[float]


def ask_off(client: Client, prompt: list[int], images: Sequence[str] = (), **sampling: object) -> OffAnswer:
    """One request to an arm without speculation, with the top-2 gap of every token.

    Args:
        images: one data URL for each image token of the prompt.
    """
    body = {
        "input_ids": prompt,
        "image_data": list(images) or None,
        "sampling_params": {"temperature": 0.0, **sampling},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    response = client.post("/generate", body).raise_for_status().json()
    meta = response["meta_info"]
    gaps = [best[0] - second[0] for best, second in meta["output_top_logprobs"]]
    assert len(gaps) == len(response["output_ids"])
    return OffAnswer(response["output_ids"], meta["finish_reason"]["type"], gaps)


def assert_equal_tokens(on: Sequence[Answer], off: Sequence[OffAnswer], prompts: Sequence[object]) -> None:
    """Fails where a request's tokens or finish reason differ from those it gets alone with speculation off.

    A difference is a tie if the off arm's two best logits lie within TIE_GAP; ties are excused at most once per
    TOKENS_PER_TIE tokens.
    """
    ties = set()  # answers to one prompt that part at one token count once
    for answer, expected, prompt in zip(on, off, prompts, strict=True):
        if answer.ids == expected.ids:
            assert answer.finish_reason == expected.finish_reason, prompt
            continue
        index = next(
            (i for i, (a, b) in enumerate(zip(answer.ids, expected.ids, strict=False)) if a != b),
            min(len(answer.ids), len(expected.ids)),
        )
        assert index < min(len(answer.ids), len(expected.ids)), f"one answer is a prefix of the other: {prompt}"
        gap = expected.gaps[index]
        assert gap < TIE_GAP, f"token {index} differs with a logit gap of {gap:.2e}: {prompt}"
        ties.add((id(expected), index))
    tokens = sum(len(answer.ids) for answer in on)
    allowed = -(-tokens // TOKENS_PER_TIE)
    assert len(ties) <= allowed, f"{len(ties)} ties in {tokens} tokens, {allowed} allowed"


def tau(answers: Sequence[Answer]) -> float:
    """Mean commit_len over all verify steps."""
    steps = sum(answer.steps for answer in answers)
    accepted = sum(n * count for answer in answers for n, count in enumerate(answer.accept_histogram))
    return 1 + accepted / steps


def steps_by_accept_len(answers: Sequence[Answer]) -> list[int]:
    """Verify steps by accept_len, 0 first."""
    counts = [0] * BLOCK_SIZE
    for answer in answers:
        for accept_len, count in enumerate(answer.accept_histogram):
            counts[accept_len] += count
    return counts

"""What a request gets alone with speculation off, and the rule for when tokens count as equal to it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from sglang_dflash.serving import AcceptanceStats, Client, Completion, TiePolicy, greedy_body

BLOCK_SIZE = 8  # of every draft in the tests with servers
TIES = TiePolicy(1e-5)  # top-2 logit gap up to which float32 may order two tokens either way


def ask_off(client: Client, prompt: list[int], images: Sequence[str] = (), **sampling: object) -> Completion:
    """One request to an arm without speculation, with the two best tokens at every index.

    Args:
        images: one data URL for each image token of the prompt.
    """
    best = {"return_logprob": True, "top_logprobs_num": 2}
    answer = client.ask({**greedy_body(prompt, **sampling), "image_data": list(images) or None, **best})
    assert answer.answered, answer
    assert len(answer.gaps) == len(answer.ids)
    return answer


def assert_equal_tokens(
    on: Sequence[Completion], off: Sequence[Completion], prompts: Sequence[object], tie_gap: float = TIES.tie_gap
) -> None:
    """Fails where a request's tokens or finish reason differ from those it gets alone with speculation off.

    A difference is excused if the off arm's two best logits tie (TIES, or `tie_gap`), and if such ties are rare.
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
        assert gap < tie_gap, f"token {index} differs with a logit gap of {gap:.2e}: {prompt}"
        ties.add((id(expected), index))
    tokens = sum(len(answer.ids) for answer in on)
    assert not TIES.too_many(len(ties), tokens), f"{len(ties)} ties in {tokens} tokens"


def tau(answers: Sequence[Completion]) -> float:
    """Mean commit_len over all verify steps."""
    return AcceptanceStats.of(answers).tau


def steps_by_accept_len(answers: Sequence[Completion]) -> list[int]:
    """Verify steps by accept_len, 0 first."""
    sums = [sum(column) for column in zip_longest(*(answer.accept_histogram for answer in answers), fillvalue=0)]
    return sums + [0] * (BLOCK_SIZE - len(sums))

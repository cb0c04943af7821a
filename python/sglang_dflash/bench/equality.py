"""Compares the tokens of arms: counts identical requests and asks the target whether differences are ties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx

from sglang_dflash.bench.records import Equality, Record
from sglang_dflash.serving import TiePolicy

EXAMPLES = 3
Gap = Callable[[list[int], int, int], float]
"""(ids before the first difference, one token, the other) -> how far the lower of their logits is below the best."""


class Reference:
    """The reference arm's answers to one dataset, with one attention backend."""

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self._answers: dict[str, Record] = {}
        self._prompts: dict[str, list[int]] = {}

    def learn(self, records: Sequence[Record], prompts: dict[str, list[int]]) -> None:
        """Keeps the first answer to each request."""
        for record in records:
            if not record.failure and record.id not in self._answers:
                self._answers[record.id] = record
                self._prompts[record.id] = prompts[record.id]

    def compare(self, records: Sequence[Record], prompts: dict[str, list[int]]) -> tuple[int, list[Record], int]:
        """
        Returns:
            The number of requests that both arms answered with the same prompt; the records among them that differ; the
            number of requests with another prompt, because an earlier turn of their session was answered differently,
            or because a server rendered the chat in another way.
        """
        known = [record for record in records if not record.failure and record.id in self._answers]
        same = [record for record in known if self._same_prompt(record, prompts[record.id])]
        parted = [record for record in same if not same_answer(self._answers[record.id], record)]
        return len(same), parted, len(known) - len(same)

    def _same_prompt(self, record: Record, prompt: list[int]) -> bool:
        foreign = record.foreign_prompt or self._answers[record.id].foreign_prompt
        return not foreign and self._prompts[record.id] == prompt

    def answer(self, id: str) -> Record:
        return self._answers[id]


def same_answer(a: Record, b: Record) -> bool:
    """Compares ids if both have them, else texts and tool calls, whose ids are random."""
    if a.ids and b.ids:
        return a.ids == b.ids
    return (a.text, [call[1:] for call in a.calls]) == (b.text, [call[1:] for call in b.calls])


def judge(
    reference: Reference,
    records: Sequence[Record],
    prompts: dict[str, list[int]],
    must_agree: bool,
    gap: Gap | None,
    tie_policy: Callable[[], TiePolicy],
) -> Equality:
    """
    Args:
        must_agree: both arms are greedy and of one engine; a difference that is not a tie then withholds speeds.
        gap: asks the target about the first difference of two answers; None: no difference is a tie.
        tie_policy: returns the rule for the target's dtype; called only if answers differ.
    """
    compared, parted, unjudged = reference.compare(records, prompts)
    identical = compared - len(parted)
    equality = Equality(reference.arm, must_agree, compared, identical, unjudged=unjudged, different=len(parted))
    if not must_agree or not parted:
        return equality
    policy = tie_policy()
    ties, examples = 0, []
    for record in parted:
        place, sentence = _place(reference.answer(record.id), record, prompts[record.id], gap)
        if policy.excuses(place):
            ties += 1
        else:
            examples.append(sentence)
    tokens = sum(record.tokens for record in records)
    if policy.too_many(ties, tokens):
        examples.append(f"{ties} ties in {tokens} tokens are more than float32 rounding explains")
        ties = 0
    return replace(equality, ties=ties, different=len(parted) - ties, examples=examples[:EXAMPLES])


def _place(expected: Record, found: Record, prompt: list[int], gap: Gap | None) -> tuple[float, str]:
    """How far from a tie the first difference is (infinite if rounding cannot explain it), and a sentence on it."""
    shared = min(len(expected.ids), len(found.ids))
    index = next((i for i in range(shared) if expected.ids[i] != found.ids[i]), shared)
    if index == shared:
        return math.inf, f"{found.id}: {len(expected.ids)} tokens expected, {len(found.ids)} received"
    theirs, ours = expected.ids[index], found.ids[index]
    sentence = f"{found.id}: token {index} is {ours} instead of {theirs}"
    if gap is None:
        return math.inf, sentence
    try:
        distance = gap([*prompt, *expected.ids[:index]], theirs, ours)
    except (httpx.HTTPError, KeyError, ValueError, TypeError) as error:
        return math.inf, f"{sentence}; the target could not be asked about it ({type(error).__name__})"
    return distance, f"{sentence}; the lower of their logits is {distance:.2e} below the best"

"""Compares the tokens of arms: counts identical requests and asks the target whether differences are ties."""

from __future__ import annotations

import math
from dataclasses import replace

import httpx

from sglang_dflash.bench.records import Equality
from sglang_dflash.serving import Client, ServerInfo, TiePolicy, differs_at
from sglang_dflash.serving.records import Record

EXAMPLES = 3
Prompted = list[tuple[Record, list[int]]]
"""Answers, each with its prompt."""


class Reference:
    """The reference arm's first answers to one dataset's requests, with one attention backend."""

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self._held: dict[str, tuple[Record, list[int]]] = {}

    def learn(self, answers: Prompted) -> None:
        for record, prompt in answers:
            self._held.setdefault(record.id, (record, prompt))

    def judge(self, answers: Prompted, must_agree: bool, target: Client | None) -> Equality:
        """
        Args:
            must_agree: both arms are greedy and of one engine; a difference that is not a tie then withholds speeds.
            target: asked about the first difference of two answers; None: no difference is a tie.

        Raises:
            ServerError: the target does not answer.
        """
        known = [(record, prompt) for record, prompt in answers if record.id in self._held]
        same = [(record, prompt) for record, prompt in known if self._held[record.id][1] == prompt]
        parted = [(record, prompt) for record, prompt in same if not _equal(self._held[record.id][0], record)]
        identical, unjudged = len(same) - len(parted), len(known) - len(same)
        equality = Equality(self.arm, must_agree, len(same), identical, unjudged=unjudged, different=len(parted))
        if not must_agree or not parted:
            return equality
        policy = TiePolicy.of(ServerInfo.ask(target).dtype) if target else TiePolicy(0.0)
        ties, examples = 0, []
        for record, prompt in parted:
            distance, sentence = _place(self._held[record.id][0], record, prompt, target)
            if policy.excuses(distance):
                ties += 1
            else:
                examples.append(sentence)
        tokens = sum(record.tokens for record, _ in answers)
        if policy.too_many(ties, tokens):
            examples.append(f"{ties} ties in {tokens} tokens are more than float32 rounding explains")
            ties = 0
        return replace(equality, ties=ties, different=len(parted) - ties, examples=examples[:EXAMPLES])


def _equal(a: Record, b: Record) -> bool:
    """Compares ids if both have them, else texts."""
    return a.ids == b.ids if a.ids and b.ids else a.text == b.text


def _place(expected: Record, found: Record, prompt: list[int], target: Client | None) -> tuple[float, str]:
    """How far from a tie the first difference is (infinite if rounding cannot explain it), and a sentence on it."""
    index = differs_at(expected.ids, found.ids)
    if index == min(len(expected.ids), len(found.ids)):
        return math.inf, f"{found.id}: {len(expected.ids)} tokens expected, {len(found.ids)} received"
    theirs, ours = expected.ids[index], found.ids[index]
    sentence = f"{found.id}: token {index} is {ours} instead of {theirs}"
    if target is None:
        return math.inf, sentence
    try:
        distance = target.logit_gap([*prompt, *expected.ids[:index]], theirs, ours)
    except (httpx.HTTPError, KeyError, ValueError, TypeError) as error:
        return math.inf, f"{sentence}; the target could not be asked about it ({type(error).__name__})"
    return distance, f"{sentence}; the lower of their logits is {distance:.2e} below the best"

"""Whether arms gave the same tokens: counts identical requests, and asks the target itself about the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx

from sglang_dflash.bench.records import Equality, Record
from sglang_dflash.serving import Client

EXAMPLES = 3
Gap = Callable[[list[int], int, int], float]
"""(ids up to where two answers part, one token, the other) -> how far their logits lie below the best, at most."""


class Reference:
    """Answers of the arm that others are compared with, for one dataset."""

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self._answers: dict[str, Record] = {}
        self._prompts: dict[str, list[int]] = {}

    def learn(self, records: Sequence[Record], prompts: dict[str, list[int]]) -> None:
        """Keeps answers to requests that it has none for."""
        for record in records:
            if not record.failure and record.id not in self._answers:
                self._answers[record.id] = record
                self._prompts[record.id] = prompts[record.id]

    def compare(self, records: Sequence[Record], prompts: dict[str, list[int]]) -> tuple[int, int, list[Record]]:
        """
        Returns:
            Requests that both arms answered to the same prompt, how many are identical, and the first record of every
            session that is not. Later turns of such a session were asked something else, and so are left out.
        """
        compared = identical = 0
        parted: dict[str, Record] = {}
        for record in records:
            mine = self._answers.get(record.id)
            if record.failure or mine is None or self._prompts[record.id] != prompts[record.id]:
                continue
            compared += 1
            if same_answer(mine, record):
                identical += 1
            else:
                parted.setdefault(record.session, record)
        return compared, identical, list(parted.values())

    def unjudged(self, records: Sequence[Record], prompts: dict[str, list[int]]) -> int:
        """Requests that both arms answered, but to different prompts."""
        return sum(
            not record.failure and record.id in self._answers and self._prompts[record.id] != prompts[record.id]
            for record in records
        )

    def answer(self, id: str) -> Record:
        return self._answers[id]


def same_answer(a: Record, b: Record) -> bool:
    """By ids where both have them, else by text."""
    return a.ids == b.ids if a.ids and b.ids else a.text == b.text


def judge(
    reference: Reference,
    records: Sequence[Record],
    prompts: dict[str, list[int]],
    must_agree: bool,
    gap: Gap | None,
    tie_gap: float,
) -> Equality:
    """
    Args:
        must_agree: greedy arms of one engine: a difference that is no tie withholds speeds.
        gap: asks the target about a place where two answers part; None: every difference counts as one.
        tie_gap: logits that lie no farther below the best tie.
    """
    compared, identical, parted = reference.compare(records, prompts)
    equality = Equality(
        reference=reference.arm,
        same_engine=must_agree,
        compared=compared,
        identical=identical,
        unjudged=reference.unjudged(records, prompts),
    )
    if not must_agree:
        return replace(equality, different=compared - identical)
    ties, examples = 0, []
    for record in parted:
        place, sentence = _place(reference.answer(record.id), record, prompts[record.id], gap)
        if place <= tie_gap:
            ties += 1
        else:
            examples.append(sentence)
    different = compared - identical - ties
    return replace(equality, ties=ties, different=different, examples=examples[:EXAMPLES])


def _place(expected: Record, found: Record, prompt: list[int], gap: Gap | None) -> tuple[float, str]:
    """How far from a tie the two answers part, infinite where that is no matter of rounding, and a sentence."""
    shared = min(len(expected.ids), len(found.ids))
    index = next((i for i in range(shared) if expected.ids[i] != found.ids[i]), shared)
    if index == shared:
        return math.inf, f"{found.id}: {len(expected.ids)} tokens expected, {len(found.ids)} came"
    theirs, ours = expected.ids[index], found.ids[index]
    sentence = f"{found.id}: token {index} is {ours} instead of {theirs}"
    if gap is None:
        return math.inf, sentence
    try:
        distance = gap([*prompt, *expected.ids[:index]], theirs, ours)
    except (httpx.HTTPError, KeyError, ValueError, TypeError) as error:
        return math.inf, f"{sentence}; the target could not be asked about it ({type(error).__name__})"
    return distance, f"{sentence}; one lies {distance:.2e} below the best logit"


def sglang_gap(client: Client) -> Gap:
    """Asks SGLang's own endpoint for the logprobs of both tokens: a prefill of the target, no draft takes part."""

    def gap(ids: list[int], one: int, other: int) -> float:
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 1,
            "token_ids_logprob": [one, other],
        }
        meta = client.post("/generate", body).raise_for_status().json()["meta_info"]
        best = meta["output_top_logprobs"][0][0][0]
        asked = {entry[1]: entry[0] for entry in meta["output_token_ids_logprobs"][0]}
        return best - min(asked[one], asked[other])

    return gap

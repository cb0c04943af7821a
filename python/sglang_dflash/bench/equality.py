"""Whether arms gave the same tokens: counts identical requests, and asks the target itself about the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import httpx

from sglang_dflash.bench.records import Equality, Record
from sglang_dflash.serving import Client

EXAMPLES = 3
FLOAT32_GAP = 1e-3  # ties of float32 lie closer than this; those of shorter types, which are many, do not
TOKENS_PER_TIE = 10_000
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

    def compare(self, records: Sequence[Record], prompts: dict[str, list[int]]) -> tuple[int, list[Record], int]:
        """
        Returns:
            Requests that both arms answered to the same prompt, the records among them that differ, and how many were
            asked something else, because an earlier turn of their session was answered otherwise.
        """
        known = [record for record in records if not record.failure and record.id in self._answers]
        same = [record for record in known if self._prompts[record.id] == prompts[record.id]]
        parted = [record for record in same if not same_answer(self._answers[record.id], record)]
        return len(same), parted, len(known) - len(same)

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
    tie_gap: Callable[[], float],
) -> Equality:
    """
    Args:
        must_agree: greedy arms of one engine: a difference that is no tie withholds speeds.
        gap: asks the target about a place where two answers part; None: every difference counts as one.
        tie_gap: logits that lie no farther below the best tie; asked for where answers part.
    """
    compared, parted, unjudged = reference.compare(records, prompts)
    identical = compared - len(parted)
    equality = Equality(reference.arm, must_agree, compared, identical, unjudged=unjudged, different=len(parted))
    if not must_agree or not parted:
        return equality
    allowed = tie_gap()
    ties, examples = 0, []
    for record in parted:
        place, sentence = _place(reference.answer(record.id), record, prompts[record.id], gap)
        if place <= allowed:
            ties += 1
        else:
            examples.append(sentence)
    tokens = sum(record.tokens for record in records)
    if allowed < FLOAT32_GAP and ties > -(-tokens // TOKENS_PER_TIE):
        examples.append(f"{ties} ties in {tokens} tokens are more than rounding gives in float32")
        ties = 0
    return replace(equality, ties=ties, different=len(parted) - ties, examples=examples[:EXAMPLES])


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
    """Asks SGLang's own endpoint for the logprobs of both tokens, with an empty prefix cache: a prefill of the target,
    in which no draft and no verified row takes part."""

    def gap(ids: list[int], one: int, other: int) -> float:
        client.post("/flush_cache?timeout=30", {}).raise_for_status()
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

"""Requests of random parameters, some invalid, some aborted; every answer must be that of speculation off."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx

from fuzz.fields import BASE, CONCURRENCY, DFLASH
from sglang_dflash.checking.cases import JSON_SCHEMA, LOGPROBS, REGEX, Asked, random_sampling, seeded_sampling
from sglang_dflash.checking.compare import Request, first_difference
from sglang_dflash.checking.recording import tokenize
from sglang_dflash.serving import (
    TINY_ENVIRONMENT,
    TINY_OVERLAPPING,
    Client,
    Completion,
    Progress,
    Server,
    ServerError,
    TiePolicy,
    greedy_body,
    last_error,
    with_best,
)
from sglang_dflash.serving.prompts import bundled_prompts

PROMPTS, VOCABULARY, CONTEXT = 48, 1792, 2048
KINDS = {"invalid": 0.15, "sampled": 0.1, "greedy": 0.75}
ABORTED_SHARE, LOGPROB_SHARE = 0.1, 0.15
ABORTED_IN_QUEUE = "Aborted by AbortReq."  # SGLang's HTTP 400 for a request that still waited for its grammar
GRAMMARS = ("regex", "json_schema")
GONE = "the server is not there any more"

# What a request may get wrong: in its sampling parameters ...
# (Not stop_token_ids outside the vocabulary: with min_new_tokens they end SGLang 0.5.23 with speculation off.)
WRONG_SAMPLING: list[dict[str, Any]] = [
    *({"temperature": -1.0}, {"temperature": "hot"}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}, {"top_k": -7}),
    *({"min_p": 2.0}, {"max_new_tokens": -3}, {"min_new_tokens": 50, "max_new_tokens": 10}, {"min_new_tokens": -1}),
    *({"frequency_penalty": 5.0}, {"presence_penalty": -3.0}, {"repetition_penalty": 0.0}, {"repetition_penalty": 3.5}),
    *({"regex": "("}, {"json_schema": "{"}, {"ebnf": "root ::="}, {"regex": REGEX, "json_schema": JSON_SCHEMA}),
    *({"stop_token_ids": ["a"]}, {"logit_bias": {"a": 1.0}}, {"logit_bias": {str(10**6): 1.0}}, {"stop": 7}, {"n": 0}),
    *({"logit_bias": {"-1": 1.0}}, {"logit_bias": {"5": "much"}}, {"no_such_parameter": 1}),
]
# ... or beside them.
WRONG_REQUEST: list[dict[str, Any]] = [
    *({"input_ids": ids} for ids in ([], [5, 10**6], [-1, 5], [7] * (CONTEXT + 500), None)),
    *({"return_logprob": True, "top_logprobs_num": -1}, {"return_logprob": True, "token_ids_logprob": [10**6]}),
    *({"return_logprob": True, "logprob_start_len": 10**6}, {"return_hidden_states": True}, {"text": "both"}),
    *({"custom_logit_processor": "not one"}, {"lora_path": "nowhere"}),
]


@dataclass(frozen=True, slots=True)
class Shot:
    """One request. `kind` is a key of KINDS; `abort_after_s` is None where it may finish."""

    kind: str
    body: dict[str, Any]
    abort_after_s: float | None

    @property
    def key(self) -> str:
        return json.dumps(self.body, sort_keys=True)

    def comparable(self, outcome: Completion) -> bool:
        """Whether speculation off gives the same: greedy, and answered or begun."""
        greedy = self.kind != "sampled" and self.body["sampling_params"].get("temperature") == 0
        return greedy and (outcome.answered or bool(outcome.ids))


def make_shots(asked: list[Asked], count: int, seed: int) -> list[Shot]:
    """Greedy ones are drawn from a quarter as many, so that the server without speculation is not asked for days."""

    def greedy(rng: Random) -> dict[str, Any]:
        one = rng.choice(asked)
        body = greedy_body(one.input_ids)
        body["sampling_params"] |= random_sampling(one, rng)
        return body | (LOGPROBS if rng.random() < LOGPROB_SHARE else {})

    def shot(rng: Random) -> Shot:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        body = rng.choice(pool) if kind == "greedy" else greedy(rng)
        if kind == "sampled":
            body["sampling_params"] |= seeded_sampling(asked[0], rng)
        elif kind == "invalid" and rng.random() < 0.6:
            kept = {name: value for name, value in body["sampling_params"].items() if name not in GRAMMARS}
            body |= {"sampling_params": kept | rng.choice(WRONG_SAMPLING)}
        elif kind == "invalid":
            body |= rng.choice(WRONG_REQUEST)
        return Shot(kind, body, rng.uniform(0.0, 0.4) if rng.random() < ABORTED_SHARE else None)

    pool = [greedy(Random(f"{seed} greedy {number}")) for number in range(max(32, count // 4))]
    return [shot(Random(f"{seed} {number}")) for number in range(count)]


def shoot(client: Client, shots: list[Shot], on_done: Callable[[], None]) -> list[Completion]:
    """All shots, CONCURRENCY at a time; one that the server does not survive is a failure."""

    def abort(rid: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            client.post("/abort_request", {"rid": rid})

    def one(number: int) -> Completion:
        shot = shots[number]
        rid = f"fuzz-{number:06}"  # of one length: SGLang aborts every request whose rid begins with the one named
        killer = threading.Timer(shot.abort_after_s or 0.0, abort, [rid])
        if shot.abort_after_s is not None:
            killer.start()
        try:
            outcome = client.ask({**shot.body, "rid": rid})
        except httpx.HTTPError as error:
            outcome = Completion(failure=GONE if isinstance(error, httpx.ConnectError) else f"no answer: {error!r}")
        if shot.abort_after_s is not None:
            killer.join()
        on_done()
        return outcome

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(one, range(len(shots))))


def complaint(shot: Shot, outcome: Completion, off: Completion | None, ties: TiePolicy) -> str:
    """What is wrong with an outcome; "" where nothing is."""
    aborted = shot.abort_after_s is not None
    if outcome.failure == GONE or (aborted and outcome.refusal == ABORTED_IN_QUEUE):
        return ""
    if outcome.refusal:
        words = outcome.refusal.split()
        return "" if len(words) > 3 and "Traceback" not in words else f"refused without a sentence: {outcome.refusal!r}"
    if outcome.failure and not (aborted and "abort" in outcome.failure.lower()):
        return f"failed: {outcome.failure}"
    limit = shot.body["sampling_params"].get("max_new_tokens", 128)
    if outcome.answered and len(outcome.ids) > max(limit, 0):  # SGLang does not cut what an aborted request got
        return f"{len(outcome.ids)} tokens where {limit} were asked for"
    if not all(0 <= token < VOCABULARY for token in outcome.ids):
        return f"ids outside of the vocabulary: {outcome.ids}"
    if off is None:
        return ""
    if off.refusal and outcome.answered:
        return f"answered, though refused with speculation off: {off.refusal}"
    if outcome.failure or off.refusal:
        same = all(a == b for a, b in zip(outcome.ids, off.ids, strict=False))
        return "" if same else f"aborted, and what it had does not begin as it should: {outcome.ids}"
    difference = first_difference(Request("fuzz", "", shot.body), off, outcome, ties)
    return "" if difference is None or difference.tie else str(difference)


def fuzz(count: int, seed: int, logs: Path, progress: Progress) -> dict[str, Any]:
    """
    Raises:
        ServerError: a server does not start, or the one without speculation ends.
    """
    with progress.waiting("Starting the DFLASH server ...") as on_wait:
        # With overlap, as on CUDA: a request may end while its next step is under way.
        server = Server([*BASE, *DFLASH], logs / "on.log", TINY_OVERLAPPING).start(on_wait=on_wait)
    with server:
        client = server.client()
        before = client.used_slots()
        tokenized = tokenize(client, bundled_prompts()[:PROMPTS], CONTEXT)
        plain = client.ask_all([greedy_body(ids, max_new_tokens=48) for _, ids in tokenized], CONCURRENCY)
        asked = [Asked(name, ids, answer, 48) for (name, ids), answer in zip(tokenized, plain, strict=True)]
        shots = make_shots(asked, count, seed)
        with progress.phase("Shots", count) as advance:
            outcomes = shoot(client, shots, advance)
        try:
            complaints = [f"{left} KV slots stay in use"] if (left := client.used_slots()) != before else []
        except httpx.HTTPError:
            complaints = [f"the server ended: {last_error(server.log)}"]
    pairs = list(zip(shots, outcomes, strict=True))
    bodies = {shot.key: shot.body for shot, outcome in pairs if shot.comparable(outcome)}
    with progress.waiting("Starting the server without speculation ...") as on_wait:
        server = Server([*BASE, "--disable-overlap-schedule"], logs / "off.log", TINY_ENVIRONMENT)
        server.start(on_wait=on_wait)
    with server, progress.phase("Speculation off", len(bodies)) as advance:
        try:
            answers = server.client().ask_all(list(map(with_best, bodies.values())), 1, advance)  # each alone
        except httpx.HTTPError:
            raise ServerError(f"Speculation off ended: {last_error(server.log)}") from None
    off, ends = dict(zip(bodies, answers, strict=True)), Counter[str]()
    for number, (shot, outcome) in enumerate(pairs):
        ends[f"{shot.kind} {'refused' if outcome.refusal else 'aborted' if outcome.failure else 'answered'}"] += 1
        expected = off.get(shot.key) if shot.comparable(outcome) else None
        if wrong := complaint(shot, outcome, expected, TiePolicy.of("float32")):
            complaints.append(f"request {number} ({shot.kind}): {wrong}; {json.dumps(shot.body)[:600]}")
    refusals = Counter(outcome.refusal[:160] for outcome in outcomes if outcome.refusal)
    found = {"tokens": sum(len(outcome.ids) for outcome in outcomes), **dict(sorted(ends.items()))}
    return {**found, "refusals": dict(refusals.most_common()), "off_requests": len(off), "complaints": complaints}

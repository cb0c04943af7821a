"""Fuzzes a DFLASH server of the embedded pair. The server must stay up, and every answer must be right or a refusal.

`fuzz` sends requests of random parameters, some invalid, and compares the answers with speculation off.
`fuzz_extremes` sends extreme values in every field of 15 endpoints (`fields.py`).
"""

from __future__ import annotations

import contextlib
import itertools
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

from sglang_dflash.checking.cases import JSON_SCHEMA, LOGPROBS, REGEX, Asked, random_sampling, seeded_sampling
from sglang_dflash.checking.compare import Request, first_difference
from sglang_dflash.checking.recording import tokenize
from sglang_dflash.fuzz.fields import fuzz_fields
from sglang_dflash.serving import (
    TINY_DRAFT,
    TINY_ENVIRONMENT,
    TINY_OVERLAPPING,
    TINY_TARGET,
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

BASE = [
    *["--device", "cpu", "--dtype", "float32", "--model-path", str(TINY_TARGET)],
    *["--max-total-tokens", "16384", "--max-running-requests", "16", "--log-level", "warning"],
]
DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(TINY_DRAFT)]
PROMPTS, CONCURRENCY, VOCABULARY, CONTEXT = 48, 8, 1792, 2048
ABORTED_IN_QUEUE = "Aborted by AbortReq."  # the host's HTTP 400 for a request that still waited for its grammar
GONE = "the server is not there any more"
INVALID_SHARE, SAMPLED_SHARE, ABORTED_SHARE, LOGPROB_SHARE = 0.15, 0.1, 0.1, 0.15

# What a request may get wrong; merged into its sampling parameters ...
# (Not stop_token_ids outside the vocabulary: with min_new_tokens they end SGLang 0.5.23 with speculation off.)
WRONG_SAMPLING: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"temperature": "hot"},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": 0},
    {"top_k": -7},
    {"min_p": 2.0},
    {"max_new_tokens": -3},
    {"min_new_tokens": 50, "max_new_tokens": 10},
    {"min_new_tokens": -1},
    {"frequency_penalty": 5.0},
    {"presence_penalty": -3.0},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 3.5},
    {"regex": "("},
    {"json_schema": "{"},
    {"ebnf": "root ::="},
    {"regex": REGEX, "json_schema": JSON_SCHEMA},
    {"stop_token_ids": ["a"]},
    {"logit_bias": {"a": 1.0}},
    {"logit_bias": {str(10**6): 1.0}},
    {"logit_bias": {"-1": 1.0}},
    {"logit_bias": {"5": "much"}},
    {"stop": 7},
    {"n": 0},
    {"no_such_parameter": 1},
]
# ... or into the request itself.
WRONG_REQUEST: list[dict[str, Any]] = [
    {"input_ids": []},
    {"input_ids": [5, 10**6]},
    {"input_ids": [-1, 5]},
    {"input_ids": [7] * (CONTEXT + 500)},
    {"input_ids": None},
    {"text": "both"},
    {"return_logprob": True, "top_logprobs_num": -1},
    {"return_logprob": True, "token_ids_logprob": [10**6]},
    {"return_logprob": True, "logprob_start_len": 10**6},
    {"return_hidden_states": True},
    {"custom_logit_processor": "not one"},
    {"lora_path": "nowhere"},
]


@dataclass(frozen=True, slots=True)
class Shot:
    """One request of the fuzz.

    Fields:
        kind: greedy, sampled or invalid.
        abort_after_s: None where it may finish.
    """

    kind: str
    body: dict[str, Any]
    abort_after_s: float | None


def make_shots(asked: list[Asked], count: int, seed: int) -> list[Shot]:
    """Greedy ones are drawn from a quarter as many, so that the off server is not asked for days."""
    pool = [_greedy(asked, Random(f"{seed} greedy {number}")) for number in range(max(32, count // 4))]
    shots = []
    for number in range(count):
        rng = Random(f"{seed} {number}")
        kind = rng.choices(
            ["invalid", "sampled", "greedy"], [INVALID_SHARE, SAMPLED_SHARE, 1 - INVALID_SHARE - SAMPLED_SHARE]
        )[0]
        body = rng.choice(pool) if kind == "greedy" else _greedy(asked, rng)
        if kind == "sampled":
            body["sampling_params"] |= seeded_sampling(asked[0], rng)
        if kind == "invalid":
            body = _spoil(body, rng)
        abort = rng.uniform(0.0, 0.4) if rng.random() < ABORTED_SHARE else None
        shots.append(Shot(kind, body, abort))
    return shots


def _greedy(asked: list[Asked], rng: Random) -> dict[str, Any]:
    one = rng.choice(asked)
    body = greedy_body(one.input_ids)
    body["sampling_params"] |= random_sampling(one, rng)
    return {**body, **(LOGPROBS if rng.random() < LOGPROB_SHARE else {})}


def _spoil(body: dict[str, Any], rng: Random) -> dict[str, Any]:
    if rng.random() < 0.6:
        for key in ("regex", "json_schema"):
            body["sampling_params"].pop(key, None)
        return {**body, "sampling_params": body["sampling_params"] | rng.choice(WRONG_SAMPLING)}
    return {**body, **rng.choice(WRONG_REQUEST)}


def shoot(client: Client, shots: list[Shot], on_done: Callable[[], None]) -> list[Completion]:
    """All shots, CONCURRENCY at a time; one that the server does not survive is a failure."""

    def abort(rid: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            client.post("/abort_request", {"rid": rid})

    def one(number: int) -> Completion:
        shot = shots[number]
        rid = f"fuzz-{number:06}"  # of one length: the host aborts every request whose rid begins with the one named
        killer = threading.Timer(shot.abort_after_s or 0.0, abort, [rid])
        if shot.abort_after_s is not None:
            killer.start()
        try:
            outcome = client.ask({**shot.body, "rid": rid})
        except httpx.ConnectError:
            outcome = Completion(failure=GONE)
        except httpx.HTTPError as error:
            outcome = Completion(failure=f"no answer: {error!r}")
        if shot.abort_after_s is not None:
            killer.join()
        on_done()
        return outcome

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(one, range(len(shots))))


def complaint(shot: Shot, outcome: Completion, off: Completion | None, ties: TiePolicy) -> str:
    """What is wrong with an outcome; "" where nothing is."""
    if outcome.refusal == ABORTED_IN_QUEUE and shot.abort_after_s is not None:
        return ""
    if outcome.refusal:
        words = outcome.refusal.split()
        return "" if len(words) > 3 and "Traceback" not in words else f"refused without a sentence: {outcome.refusal!r}"
    if outcome.failure == GONE:
        return ""  # it never arrived
    if outcome.failure and (shot.abort_after_s is None or "abort" not in outcome.failure.lower()):
        return f"failed: {outcome.failure}"
    limit = shot.body["sampling_params"].get("max_new_tokens", 128)
    # What an aborted request got is not cut to its limit by the host.
    if (len(outcome.ids) > max(limit, 0) and outcome.answered) or any(
        not 0 <= token < VOCABULARY for token in outcome.ids
    ):
        return f"{len(outcome.ids)} tokens where {limit} were asked for, or ids outside of the vocabulary"
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
        bodies = [greedy_body(ids, max_new_tokens=48) for _, ids in tokenized]
        plain = client.ask_all(bodies, CONCURRENCY)
        asked = [Asked(name, ids, answer, 48) for (name, ids), answer in zip(tokenized, plain, strict=True)]
        shots = make_shots(asked, count, seed)
        with progress.phase("Shots", count) as advance:
            outcomes = shoot(client, shots, advance)
        try:
            complaints = [f"{left} KV slots stay in use"] if (left := client.used_slots()) != before else []
        except httpx.HTTPError:
            complaints = [f"the server ended: {last_error(server.log)}"]
    answered = [shot.body for shot, outcome in zip(shots, outcomes, strict=True) if comparable(shot, outcome)]
    off = ask_off(list({_key(body): body for body in answered}.values()), logs, progress)
    ties = TiePolicy.of("float32")
    for number, (shot, outcome) in enumerate(zip(shots, outcomes, strict=True)):
        expected = off.get(_key(shot.body)) if comparable(shot, outcome) else None
        wrong = complaint(shot, outcome, expected, ties)
        if wrong:
            complaints.append(f"request {number} ({shot.kind}): {wrong}; {json.dumps(shot.body)[:600]}")
    return {"requests": count, **summary(shots, outcomes), "off_requests": len(off), "complaints": complaints}


def comparable(shot: Shot, outcome: Completion) -> bool:
    """Whether speculation off gives the same: greedy, and answered or begun."""
    greedy = shot.kind != "sampled" and shot.body["sampling_params"].get("temperature") == 0
    return greedy and (outcome.answered or bool(outcome.ids))


def _key(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)


def ask_off(bodies: list[dict[str, Any]], logs: Path, progress: Progress) -> dict[str, Completion]:
    """Every body alone on a server without speculation, by `_key`."""
    with progress.waiting("Starting the server without speculation ...") as on_wait:
        server = Server([*BASE, "--disable-overlap-schedule"], logs / "off.log", TINY_ENVIRONMENT).start(
            on_wait=on_wait
        )
    answers = {}
    with server, progress.phase("Speculation off", len(bodies)) as advance:
        client = server.client()
        for body in bodies:
            try:
                answers[_key(body)] = client.ask(with_best(body))
            except httpx.HTTPError:
                raise ServerError(f"Speculation off ended over {_key(body)[:400]}: {last_error(server.log)}") from None
            advance()
    return answers


def summary(shots: list[Shot], outcomes: list[Completion]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for shot, outcome in zip(shots, outcomes, strict=True):
        end = "refused" if outcome.refusal else "aborted" if outcome.failure else "answered"
        counts[f"{shot.kind} {end}"] += 1
        if outcome.refusal:
            refusals[outcome.refusal[:160]] += 1
    tokens = sum(len(outcome.ids) for outcome in outcomes)
    return {"tokens": tokens, **dict(sorted(counts.items())), "refusals": dict(refusals.most_common())}


def fuzz_extremes(count: int, seed: int, logs: Path, progress: Progress) -> dict[str, Any]:
    """Extremes in every field.

    Raises:
        ServerError: a server does not start.
    """
    numbers = itertools.count(1)
    environment = {**TINY_OVERLAPPING, "HF_HUB_OFFLINE": "1"}  # names of models that do not exist are answered at once

    def start() -> Server:
        return Server([*BASE, *DFLASH], logs / f"on-{next(numbers)}.log", environment).start()

    with progress.phase("Requests", count) as advance:
        findings = fuzz_fields(start, count, seed, advance)
    return {"requests": count, "statuses": dict(sorted(findings.statuses.items())), "complaints": findings.complaints}

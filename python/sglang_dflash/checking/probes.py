"""Detects contamination between concurrent requests, by a marker word in each of them. Needs no off arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sglang_dflash.serving import Client, Completion, greedy_body
from sglang_dflash.serving.sessions import Message

ECHO = "Repeat the code word {marker} ten times, with spaces between, and write nothing else."
FORCED = "Say the code word."
# For the embedded pair: its target does not know code words, but its answers name the things of a word problem.
THINGS = ("pens", "cups", "hats", "maps", "lamps", "balls")
PROBLEM = "A {one} costs 3 coins and a {one} box costs {price} coins. Nora buys 4 {many} and 2 boxes. How many coins?"


@dataclass(frozen=True, slots=True)
class Marked:
    """A request with a marker word that no other request has; `body` is that of POST /generate."""

    marker: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contamination:
    """The answers to concurrent requests with markers.

    Fields:
        asked: number of answered requests.
        own: number of answers that hold their own marker; with none, the probe shows little.
        foreign: one sentence per answer that holds another request's marker.
        refused: the server's messages for refused requests.
        failed: one sentence per failed request.
    """

    asked: int = 0
    own: int = 0
    foreign: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def code_words(rng: Random, count: int) -> list[str]:
    """Distinct random words of capital letters, which no text holds by chance."""
    words: set[str] = set()
    while len(words) < count:
        words.add("".join(rng.choice("BCDFGHJKLMNPQRSTVWXZ") for _ in range(6)))
    return sorted(words)


def marked_requests(client: Client, rng: Random, count: int, limit: int, embedded: bool) -> list[Marked]:
    """In random order: `count` prompts that hold a code word, `count` grammars that force one, and for the embedded
    pair also word problems."""
    marked = []
    (forced_ids,) = _tokenize(client, [FORCED])
    words = code_words(rng, 2 * count)
    for word, ids in zip(words[:count], _tokenize(client, [ECHO.format(marker=w) for w in words[:count]]), strict=True):
        marked.append(Marked(word, greedy_body(ids, max_new_tokens=limit)))
    for word in words[count:]:
        marked.append(Marked(word, greedy_body(forced_ids, max_new_tokens=limit, regex=f"({word} ){{3,12}}")))
    if embedded:
        problems = [PROBLEM.format(one=one[:-1], many=one, price=number) for number, one in enumerate(THINGS, start=4)]
        for word, ids in zip(THINGS, _tokenize(client, problems), strict=True):
            marked.append(Marked(word, greedy_body(ids, max_new_tokens=limit)))
    rng.shuffle(marked)
    return marked


def _tokenize(client: Client, questions: Sequence[str]) -> list[list[int]]:
    ids = []
    for question in questions:
        try:
            ids.append(client.tokenize([Message("user", question)]))
        except ValueError:  # a tokenizer without chat template
            ids.append(client.tokenize(question))
    return ids


def probe_contamination(
    client: Client, marked: Sequence[Marked], concurrency: int, on_done: Callable[[], None]
) -> Contamination:
    """Sends the requests concurrently. A foreign marker does not count if the same request, alone, also gives it."""
    outcomes = client.ask_all([one.body for one in marked], concurrency, on_done)
    foreign = []
    for one, outcome in zip(marked, outcomes, strict=True):
        heard = foreign_markers(one.marker, outcome, [other.marker for other in marked])
        if heard:
            alone = foreign_markers(one.marker, client.ask(one.body), heard)
            foreign += [
                f"the answer to the request with marker {one.marker} holds {word}: {outcome.text[:80]!r}"
                for word in heard
                if word not in alone
            ]
    answered = [(one, outcome) for one, outcome in zip(marked, outcomes, strict=True) if outcome.answered]
    return Contamination(
        asked=len(answered),
        own=sum(one.marker in outcome.text for one, outcome in answered),
        foreign=foreign,
        refused=sorted({outcome.refusal for outcome in outcomes if outcome.refusal}),
        failed=[
            f"the request with marker {m.marker}: {o.failure}"
            for m, o in zip(marked, outcomes, strict=True)
            if o.failure
        ],
    )


def foreign_markers(own: str, outcome: Completion, markers: Sequence[str]) -> list[str]:
    """The markers of other requests that an answer holds."""
    return [marker for marker in markers if marker != own and marker in outcome.text]

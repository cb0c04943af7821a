"""Whether requests hear each other: words that only one of them knows, asked for at once. Needs no off arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sglang_dflash.checking.asking import Outcome, ask, ask_all, greedy_body
from sglang_dflash.checking.prompts import Prompt
from sglang_dflash.serving import Client

ECHO = "Repeat the code word {marker} ten times, with spaces between, and write nothing else."
FORCED = "Say the code word."
# Of the embedded pair's word problems: its target knows no code words, but its answers name what the question names.
THINGS = ("pens", "cups", "hats", "maps", "lamps", "balls")
PROBLEM = "A {one} costs 3 coins and a {one} box costs {price} coins. Nora buys 4 {many} and 2 boxes. How many coins?"


@dataclass(frozen=True, slots=True)
class Marked:
    """A request with a word that no other one has; the body is POST /generate's."""

    marker: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contamination:
    """What concurrent requests with markers got.

    Fields:
        asked: requests answered.
        own: how many of the answers hold their own marker; with none of them, the probe says little.
        foreign: one sentence per answer that holds another request's marker.
        refused: sentences of refused requests.
        failed: what went wrong with the others.
    """

    asked: int = 0
    own: int = 0
    foreign: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def code_words(rng: Random, count: int) -> list[str]:
    """Distinct words of capitals that no text holds by chance."""
    words: set[str] = set()
    while len(words) < count:
        words.add("".join(rng.choice("BCDFGHJKLMNPQRSTVWXZ") for _ in range(6)))
    return sorted(words)


def marked_requests(client: Client, rng: Random, count: int, limit: int, embedded: bool) -> list[Marked]:
    """Two for each of `count` code words: a prompt that holds it, and a grammar that forces it; for the embedded pair
    word problems besides."""
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
            chat = Prompt("probe", "messages", [{"role": "user", "content": question}], {})
            ids.append(chat.token_ids(client))
        except ValueError:  # a tokenizer without chat template
            ids.append(Prompt("probe", "text", question, {}).token_ids(client))
    return ids


def probe_contamination(
    client: Client, marked: Sequence[Marked], concurrency: int, on_done: Callable[[], None]
) -> Contamination:
    """Asks all of them at once. A word that an answer holds even where it is asked for alone is the model's own."""
    outcomes = ask_all(client, [one.body for one in marked], concurrency, on_done)
    foreign = []
    for one, outcome in zip(marked, outcomes, strict=True):
        heard = foreign_markers(one.marker, outcome, [other.marker for other in marked])
        if heard:
            alone = foreign_markers(one.marker, ask(client, one.body), heard)
            foreign += [
                f"the request marked {one.marker} was answered with {word}: {outcome.text[:80]!r}"
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
            f"the request marked {m.marker}: {o.failure}" for m, o in zip(marked, outcomes, strict=True) if o.failure
        ],
    )


def foreign_markers(own: str, outcome: Outcome, markers: Sequence[str]) -> list[str]:
    """Which of the markers that are not its own an answer holds."""
    return [marker for marker in markers if marker != own and marker in outcome.text]

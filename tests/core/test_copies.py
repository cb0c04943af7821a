"""Copies of a request's own text: where they are found, and what they promise."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from sglang_dflash.core import copies
from sglang_dflash.core.copies import LONGEST, PLACES, RUN, Copies, Match, Offer, Text, TextIndex

VOCAB = 1000
MOST = 7


def longest(tokens: list[int]) -> Match | None:
    """By brute force: of the latest PLACES of the last RUN tokens, the one with the longest match; the latest wins."""
    ends = [end for end in range(len(tokens) - 1, RUN - 1, -1) if tokens[end - RUN : end] == tokens[-RUN:]][:PLACES]

    def equal(end: int) -> int:
        return max(n for n in range(RUN, min(end, LONGEST) + 1) if tokens[end - n : end] == tokens[len(tokens) - n :])

    return max((Match(equal(end), end) for end in ends), default=None)


@pytest.mark.parametrize("ids", [2, 4, 30])
@pytest.mark.parametrize("prompt", [0, 1, 2, 150])
def test_the_index_finds_what_a_search_finds(ids, prompt):
    """Fails where another place than the longest of the latest ones is found, in a prompt or behind it."""
    chance = random.Random(ids + prompt)
    tokens = [chance.choice([*range(ids - 1), -5]) for _ in range(prompt)]  # pads are negative
    index, found = TextIndex(tokens), 0
    for _ in range(300):
        assert index.find() == longest(tokens), tokens
        found += index.find() is not None
        new = [chance.randrange(ids) for _ in range(chance.randint(1, 4))]
        tokens = tokens + new
        index.extend(new)
    assert index.tokens == tokens and found > 50


def test_more_places_are_not_looked_at():
    """Fails where the cost of a search grows with the text."""
    index = TextIndex([9, 1, 2, 8, *[1, 2] * PLACES, 9, 1, 2])
    assert index.find() == Match(2, 4 + 2 * PLACES)


def test_a_copy_goes_in_circles():
    """Fails where a text that has begun to repeat itself gets fewer tokens than asked for."""
    index = TextIndex([5, 6, 7, 5, 6])
    assert index.copy(2, 7) == [7, 5, 6, 7, 5, 6, 7]


def serve(offering: Copies, name: str, prompt: list[int], answer: list[int], accepts: int = 1) -> list[Offer | None]:
    """The offers of a request that emits `accepts` tokens a step."""
    text, offers = Text(name, prompt, []), []
    while len(text.answer) < len(answer):
        text.answer.extend(answer[len(text.answer) : len(text.answer) + accepts])
        offers += offering.offers([text])
    return offers


def noise(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("accepts", [1, 5])
def test_quoted_text_is_offered(accepts):
    """Fails where a text that is quoted is not proposed in full, or is promised little after 200 right tokens."""
    prompt = noise(random.Random(1), 200)
    offers = serve(Copies(MOST, VOCAB), "a", prompt, prompt, accepts)[2:]
    for step, offer in enumerate(offers[:20]):
        begin = (step + 3) * accepts
        assert offer is not None and offer.ids == prompt[begin : begin + MOST][: len(offer.ids)]
        assert len(offer.ids) == len(offer.survival) == MOST
        assert all(0 < b <= a < 1 for a, b in zip(offer.survival, offer.survival[1:], strict=False))
    assert offers[-1] is not None and sum(offers[-1].survival) > 0.9 * MOST


def test_chances_follow_what_was_right():
    """Fails where half of the copies are right and much more or less is promised, for any of two lengths."""
    chance, offering = random.Random(2), Copies(1, VOCAB)
    promised: dict[bool, list[float]] = {True: [], False: []}
    right: dict[bool, list[bool]] = {True: [], False: []}
    for number in range(400):
        is_long = number % 2 == 1
        quoted = noise(chance, LONGEST if is_long else RUN)
        is_right = chance.random() < (0.9 if is_long else 0.3)
        text = Text(f"{number}", [*quoted, 1], list(quoted))
        (offer,) = offering.offers([text])
        assert offer is not None and offer.ids == [1]
        text.answer.append(1 if is_right else 2)
        offering.offers([text])
        promised[is_long].append(offer.survival[0])
        right[is_long].append(is_right)
    for is_long in promised:
        assert mean(promised[is_long][-50:]) == pytest.approx(mean(right[is_long]), abs=0.08)


def test_a_request_whose_copies_fail_is_promised_less_until_they_are_right_again():
    """Fails where copies are promised as before after eight wrong ones, where another request pays for it in full, or
    where eight right ones do not bring most of it back."""
    pairs = [(2 * n + 10, 2 * n + 11) for n in range(40)]
    prompt = [token for pair in pairs for token in (*pair, 1)]
    offering, texts = Copies(MOST, VOCAB), [Text("fails", prompt, []), Text("other", prompt, [])]

    def promised(pair: tuple[int, int]) -> list[float]:
        for text in texts:
            text.answer.extend(pair)
        return [0.0 if offer is None else sum(offer.survival) for offer in offering.offers(texts)]

    def go_on(failing: int, other: int) -> None:
        texts[0].answer.append(failing)
        texts[1].answer.append(other)

    before = promised(pairs[0])[0]
    for pair in pairs[1:9]:
        go_on(2, 1)
        after = promised(pair)
    assert after[0] < 0.5 * before and after[1] > 2 * after[0], (before, after)
    for pair in pairs[9:17]:
        go_on(1, 1)
        again = promised(pair)
    assert again[0] > after[0] + 0.5 * (before - after[0]), (before, after, again)


def test_unverified_copies_are_learned_from():
    """Fails where copies must be verified before they are believed: here nobody takes any."""
    prompt = noise(random.Random(3), 100)
    offers = serve(Copies(MOST, VOCAB), "a", prompt, prompt[:60])
    assert sum(offers[59].survival) > 1.3 * sum(offers[1].survival)


def test_ids_outside_the_vocabulary_are_not_copied():
    """Fails where an id that stands for a picture would be verified as a token."""
    (_, offer) = serve(Copies(MOST, VOCAB), "a", [5, 6, 7, 8, VOCAB, 9, 5, 4], [5, 6])
    assert offer is not None and offer.ids == [7, 8]
    assert serve(Copies(MOST, VOCAB), "a", [5, 6, -1, 8, 9], [5, 6])[-1] is None
    assert serve(Copies(MOST, VOCAB), "a", [5, 6, 1 << 40, 8, 9], [5, 6])[-1] is None


def test_other_requests_are_forgotten():
    """Fails where a server keeps texts of requests that have left."""
    offering = Copies(MOST, VOCAB)
    for number in range(50):
        offering.offers([Text(f"{number}", [1, 2], []), Text(f"{number + 1}", [1, 2], [])])
    assert list(offering._requests) == ["49", "50"]


def test_a_name_may_come_again_with_another_text():
    """Fails where a request gets tokens of another one that had its name before."""
    offering = Copies(MOST, VOCAB)
    serve(offering, "a", [5, 6, 7, 8], [1, 2, 3, 5, 6])
    offers = serve(offering, "a", [5, 6, 9, 8], [4, 5, 6, 9, 9, 9])
    assert offers[2] is not None and offers[2].ids[0] == 9


def test_a_long_prompt_is_indexed_at_its_end(monkeypatch):
    """Fails where the index of one request grows without a bound."""
    monkeypatch.setattr(copies, "MOST_TOKENS", 50)
    offering, prompt = Copies(MOST, VOCAB), noise(random.Random(4), 200)
    assert serve(offering, "first", prompt, prompt[20:22])[-1] is None
    offer = serve(offering, "last", prompt, prompt[170:172])[-1]
    assert offer is not None and offer.ids == prompt[172 : 172 + MOST]

"""Copies against a specification that compares every place of the text, and what is learned of their worth."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from sglang_dflash.core import copying
from sglang_dflash.core.copying import GRAMS, LONGEST_MATCH, PLACES, Copying, Match, Text, TextIndex, best_copies

VOCAB = 50


def find_in(text: Sequence[int]) -> Match | None:
    """The specification of `TextIndex.find`."""
    end = len(text)
    for size in GRAMS:
        places = [place for place in range(end - 1, size - 1, -1) if text[place - size : place] == text[end - size :]]
        lengths = {}
        for place in places[:PLACES]:
            most = min(LONGEST_MATCH, place)
            lengths[place] = next((n for n in range(most) if text[place - 1 - n] != text[end - 1 - n]), most)
        if lengths:
            follows = max(lengths, key=lambda place: (lengths[place], place))
            return Match(lengths[follows], follows)
    return None


def text_of(chance: random.Random, length: int, ids: int) -> list[int]:
    """Random tokens, between copies of what came before."""
    text: list[int] = []
    while len(text) < length:
        if len(text) > 5 and chance.random() < 0.5:
            first, count = chance.randrange(len(text)), chance.randint(1, 40)
            text += [text[first + i] for i in range(min(count, len(text) - first))]
        else:
            text += [chance.randrange(ids) for _ in range(chance.randint(1, 6))]
    return text[:length]


@pytest.mark.parametrize("seed", range(12))
def test_the_index_finds_what_a_search_finds(seed):
    """Fails where a place is forgotten, a worse one is taken, tokens that came later are not found, or a text that was
    indexed at once is another than one that grew."""
    chance = random.Random(seed)
    ids = chance.choice([2, 4, 30, 2**31])
    text = text_of(chance, chance.randint(0, 300), ids)
    known = chance.randint(0, len(text))
    index, end = TextIndex(text[:known]), known
    found = 0
    while end < len(text):
        step = text[end : end + chance.randint(1, 9)]
        index.extend(step)
        end += len(step)
        assert index.find() == find_in(text[:end])
        found += index.find() is not None
    assert TextIndex(text).find() == index.find()
    assert index.tokens == text


def test_short_texts_have_no_match():
    """Fails where a text shorter than a match ends the server."""
    for text in ([], [1], [1, 1], [1, 1, 1]):
        assert TextIndex(text).find() is None
    assert TextIndex([1, 1, 1, 1]).find() == Match(3, 3)


def test_a_longer_match_is_preferred():
    """Fails where the latest of frequent short matches hides the place where the text was copied from."""
    origin = list(range(20))
    frequent = [9, 10, 11, 40] * 30  # the last three tokens, many times
    index = TextIndex([*origin, *frequent, *origin[:12]])
    assert index.find() == Match(12, 12)
    assert index.copy(12, 5) == [12, 13, 14, 15, 16]


def test_a_text_that_repeats_itself_goes_on():
    """Fails where a copy ends at the end of the text."""
    index = TextIndex([7, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    match = index.find()
    assert match == Match(6, 7)
    assert index.copy(match.follows, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_frequent_tokens_cost_a_bounded_search():
    """Fails where a search compares more than some places, or the whole of a long match."""
    index = TextIndex([1] * 40_000)
    compared = 0

    class Counting(list):
        def __getitem__(self, place):
            nonlocal compared
            compared += 1
            return super().__getitem__(place)

    index.tokens = Counting(index.tokens)
    assert index.find() == Match(LONGEST_MATCH, 39_999)
    assert compared <= 2 * PLACES * LONGEST_MATCH + 2


# What is offered.


def run(copying_: Copying, texts: dict[str, tuple[list[int], list[int]]], steps: int, per_step: int = 1):
    """Yields each step's offers, then commits `per_step` tokens of each answer."""
    shown = {name: Text(array("q", prompt), array("q")) for name, (prompt, _) in texts.items()}
    for step in range(steps):
        copying_.see(shown)
        yield {name: copying_.offer(name) for name in texts}
        for name, (_, answer) in texts.items():
            shown[name].answer.extend(answer[step * per_step : (step + 1) * per_step])


def assert_own_tokens(make: type[Copying]) -> None:
    """Each request's offers are tokens that followed the match in its own text."""
    chance = random.Random(3)
    texts = {}
    for place, name in enumerate("abc"):  # texts of ids that no other has
        text = [17 * place + token for token in text_of(chance, 400, 5)]
        texts[name] = text[:100], text[100:]
    copies = make(6, VOCAB + 17)
    offered = dict.fromkeys(texts, 0)
    for step, offers in enumerate(run(copies, texts, 290)):
        for name, offer in offers.items():
            if offer is None:
                continue
            prompt, answer = texts[name]
            text = [*prompt, *answer[:step]]
            match = find_in(text)
            assert match is not None
            span = text[match.follows :]
            assert offer.ids == [span[i % len(span)] for i in range(6)], name
            offered[name] += 1
    assert min(offered.values()) > 30, offered


def test_a_request_copies_its_own_tokens():
    """Fails where a request is offered what another's text holds, or what its own does not."""
    assert_own_tokens(Copying)


def test_mixed_requests_are_noticed():
    """Fails where the test above could not fail."""

    class Mixing(Copying):
        def _request(self, name):
            return super()._request("a" if name == "b" else name)

    with pytest.raises(AssertionError):
        assert_own_tokens(Mixing)


def test_a_name_that_comes_again_has_a_new_text():
    """Fails where a request copies from an earlier one of the same name."""
    copies = Copying(4, VOCAB)
    old, new = [1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 9, 1, 2, 3]
    for prompt in (old, new):
        copies.see({"a": Text(prompt, array("q"))})
        assert copies.offer("a").ids[0] == prompt[3]


def test_requests_that_end_are_let_go():
    """Fails where the memory of a server grows with the requests that it has served."""
    copies = Copying(4, VOCAB)
    for turn in range(5):
        names = [f"{turn}-{i}" for i in range(3)]
        copies.see({name: Text([1, 2, 3, 1, 2, 3], array("q")) for name in names})
        assert all(copies.offer(name) for name in names)
        assert set(copies._requests) == set(names)


def test_ids_that_are_no_tokens_are_not_copied():
    """Fails where the ids that stand for a picture are proposed, for which there is no embedding."""
    copies = Copying(6, VOCAB)
    for wrong in (VOCAB, 1 << 40, -5):
        copies.see({"a": Text([1, 2, 3, 4, wrong, 5, 1, 2, 3], array("q"))})
        assert copies.offer("a").ids == [4]
        copies.see({"a": Text([1, 2, 3, wrong, 5, 1, 2, 3], array("q"))})
        assert copies.offer("a") is None


@pytest.mark.parametrize(("room", "count"), [(None, 6), (9, 6), (6, 6), (2, 2), (1, 1), (0, 0), (-3, 0)])
def test_a_copy_keeps_to_its_room(room, count):
    """Fails where a copy has more tokens than its request has slots for, or fewer than it may have."""
    copies = Copying(6, VOCAB)
    copies.see({"a": Text([*range(20), *range(5)], array("q"), room=room)})
    offer = copies.offer("a")
    assert (offer.ids if offer else []) == [5, 6, 7, 8, 9, 10][:count]


def test_a_long_prompt_is_indexed_in_part():
    """Fails where a prompt of any length is indexed as a whole."""
    prompt = [1, 2, 3, 4] + [5] * copying.MOST_TOKENS + [1, 2, 3]
    copies = Copying(4, VOCAB)
    copies.see({"a": Text(prompt, array("q"))})
    assert copies.offer("a") is None
    assert len(copies._requests["a"].index.tokens) == copying.MOST_TOKENS


# What a copy is worth.


def test_chances_follow_success():
    """Fails where copies that have always been right promise no more than at first, or copies that have failed promise
    as much; or where what one request has shown says nothing of others."""
    prompt = list(range(30))
    twice = [*range(30)] * 20
    copies = Copying(4, VOCAB)
    offers = [step["a"] for step in run(copies, {"a": (prompt, twice)}, 500)]
    offered = [offer for offer in offers if offer is not None]
    assert len(offered) > 400 and offered[-1].reaches[3] > 0.97 > offered[0].reaches[3]
    assert offered[-1].reaches == sorted(offered[-1].reaches, reverse=True)
    fresh = next(step["b"] for step in run(copies, {"b": ([1, 2, 3] * 20, [])}, 1))
    untaught = next(step["b"] for step in run(Copying(4, VOCAB), {"b": ([1, 2, 3] * 20, [])}, 1))
    assert fresh.reaches[3] > untaught.reaches[3]
    chance = random.Random(1)
    wrong = [chance.randrange(4) for _ in range(4000)]
    failing = [step["c"] for step in run(copies, {"c": (wrong[:2000], wrong[2000:])}, 1500)]
    after = [offer.reaches[0] for offer in failing[-500:] if offer is not None]
    assert 0.15 < sum(after) / len(after) < 0.4, sum(after) / len(after)  # one of four is right


def test_copies_that_fail_are_seldom_searched():
    """Fails where a text whose copies are always wrong is searched in each step, or never again."""
    answer = []
    for turn in range(300):  # the same three tokens, then another one each time
        answer += [1, 2, 3, 10 + turn]
    copies = Copying(4, 1000)
    searched = [step["a"] is not None for step in run(copies, {"a": ([1, 2, 3, 9, 1, 2, 3], answer[3:])}, 280, 4)]
    assert 280 / 9 < sum(searched) < 280 / 6, sum(searched)


def test_learning_counts_tokens_up_to_the_first_wrong_one():
    """Fails where tokens behind a wrong one count, or a step's tokens are compared with another offer."""
    copies = Copying(6, VOCAB)
    text = Text([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], array("q"))
    copies.see({"a": text})
    before = sum(copies._trials), sum(copies._hits)
    assert copies.offer("a").ids == [4, 5, 6, 7, 8, 1]
    text.answer.extend([4, 5, 20, 7, 8])
    copies.see({"a": text})
    copies.offer("a")
    trials, hits = sum(copies._trials) - before[0], sum(copies._hits) - before[1]
    assert trials == pytest.approx(3, abs=0.1) and hits == pytest.approx(2, abs=0.1)
    request = copies._requests["a"]
    assert request.misses == 1 and 0.5 < request.expected_misses < 2.5


def test_tokens_that_the_host_gets_later_are_taken_once():
    """Fails where a turn's tokens are not copied from, or are taken again when the host has them."""
    copies, answer = Copying(4, VOCAB), array("q")
    for known, newest, offered in (
        ([], [], [4, 5, 6, 1]),
        ([], [4, 5, 6], [1, 2, 3, 4]),
        ([], [4, 5, 6, 1, 9], None),
        ([4, 5, 6, 1, 9], [], None),
        ([4, 5, 6, 1, 9], [5, 6, 1], [9, 5, 6, 1]),
    ):
        answer[:] = array("q", known)
        copies.see({"a": Text([1, 2, 3, 4, 5, 6, 1, 2, 3], answer, newest)})
        offer = copies.offer("a")
        assert (offer and offer.ids) == offered, newest
        assert copies._requests["a"].index.tokens == [1, 2, 3, 4, 5, 6, 1, 2, 3, *known, *newest]


# Copy or draft.


def offer_of(*reaches: float) -> copying.Offer:
    return copying.Offer(list(range(len(reaches))), list(reaches))


@pytest.mark.parametrize(
    ("offers", "drafts", "draft", "lens", "drafted"),
    [
        ([None, None], {0: 1.0, 1: 1.0}, 0.5, {}, [0, 1]),
        ([offer_of(0.9, 0.8, 0.1), None], {}, 0.5, {0: 2}, []),
        ([offer_of(0.1, 0.05), None], {}, 0.5, {}, []),  # not worth its rows
        ([offer_of(0.9, 0.8), None], {0: 0.5, 1: 1.0}, 0.5, {0: 2}, [1]),
        ([offer_of(0.9, 0.8), None], {0: 2.0, 1: 1.0}, 0.5, {}, [0, 1]),
        ([offer_of(0.9, 0.8), None], {0: 0.5, 1: 0.4}, 0.5, {0: 2}, []),  # what is left does not pay the draft
        ([offer_of(0.9), offer_of(0.9)], {0: 0.8, 1: 0.8}, 0.5, {0: 1, 1: 1}, []),
    ],
)
def test_a_request_gets_what_promises_most(offers, drafts, draft, lens, drafted):
    """Fails where a copy displaces a better block, or a draft runs for too little."""
    copies, of_draft = best_copies(offers, drafts, draft, least=0.2)
    assert ({request: len(offer.ids) for request, offer in copies.items()}, of_draft) == (lens, drafted)
    assert all(len(offer.ids) == len(offer.reaches) for offer in copies.values())

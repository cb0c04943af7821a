"""Copies: where a request's last tokens occurred before in its own text, what followed them there is proposed again.

The text of a request is its prompt and its answer (prompt lookup). `TextIndex` finds an earlier place of the last
tokens. `Copies` keeps an index for each running request, and says how likely each copied token is. It learns from every
offer, verified or not: the tokens that the request emits show what the copy would have been worth. So a request whose
copies were wrong is promised little of the next ones, until they are right again.

An offer depends on the prefix alone: on earlier tokens, and on how right earlier offers were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice
from operator import mul
from typing import NamedTuple

import numpy as np

RUN = 2
"""Tokens that must equal the last ones. One alone is found in too many places."""
PLACES = 8
"""Latest places of equal tokens that are compared. On edited texts, one would find almost as much."""
LONGEST = 16
"""Tokens that are compared at a place. The chances of longer matches are the same."""
MOST_TOKENS = 1 << 16
"""Tokens at the end of a prompt that are indexed, in some 20 ms."""
LENGTHS = {RUN: 0.4, 3: 0.5, 4: 0.6, 6: 0.7, 9: 0.8, LONGEST: 0.9}
"""Length of a match, up to the next one -> first guess of the chance that the token behind it is right. A little less
than SmolLM2 reached where it was asked to edit a text."""
GUESS = 8.0
"""Copied tokens that such a guess weighs as much as."""
KEPT, KEPT_OF_REQUEST = 0.9995, 0.95
"""Share of what all requests, and one, have taught that stays after a token: the last 2,000 and 20 or so count."""
LEAST, MOST = 0.01, 0.99
"""Bounds of a chance."""


class Match(NamedTuple):
    """An earlier place of a text's last tokens: how many are equal, and the index of the token behind them."""

    length: int
    follows: int


class TextIndex:
    """The places of all pairs of tokens in a growing text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = list(tokens)
        ids = np.array(self.tokens, dtype=np.int64)
        keys, ends = (ids[:-1] << 32) + ids[1:], np.arange(RUN, len(ids) + 1)
        order = np.argsort(keys, kind="stable")
        again = keys[order[1:]] == keys[order[:-1]]
        before = np.full(len(ids) + 1, -1)
        before[ends[order[1:][again]]] = ends[order[:-1][again]]
        # Pair -> index behind its latest place; by that index: behind the place before, or -1.
        self._latest: dict[int, int] = dict(zip(keys.tolist(), ends.tolist(), strict=True))
        self._before: list[int] = before.tolist()

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            place = -1
            if len(self.tokens) >= RUN:
                key = (self.tokens[-2] << 32) + token
                place = self._latest.get(key, -1)
                self._latest[key] = len(self.tokens)
            self._before.append(place)

    def find(self) -> Match | None:
        """The longest match among the latest PLACES of the last pair. Ties: the latest."""
        place, found = self._before[-1], None
        for _ in range(PLACES):
            if place < 0:
                break
            length = self._equal(place)
            if found is None or length > found.length:
                found = Match(length, place)
            place = self._before[place]
        return found

    def _equal(self, place: int) -> int:
        """How many tokens before an index equal the last ones."""
        tokens, length, last = self.tokens, 0, len(self.tokens) - 1
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[last - length]:
            length += 1
        return length

    def copy(self, follows: int, count: int) -> list[int]:
        """The `count` tokens from an index on. At the text's end they begin anew, as a text in circles does."""
        return list(islice(cycle(self.tokens[follows : follows + count]), count))


class Text(NamedTuple):
    """A running request: its name, and its prompt and answer so far, which grows in place."""

    name: str
    prompt: Sequence[int]
    answer: Sequence[int]


class Offer(NamedTuple):
    """Tokens that may be verified behind a text, at least one; `survival`: the chance that each of them and all before
    it are accepted, falling."""

    ids: list[int]
    survival: list[float]


@dataclass(slots=True)
class _Request:
    """What is kept of a request.

    Fields:
        index: of the prompt and `taken` tokens of the answer.
        ids, groups: of the latest offer: its tokens, and the group of each one's match; empty once it was learned from.
        misses, expected: wrong copied tokens, and how many were to be expected; older ones count less.
    """

    prompt: Sequence[int]
    index: TextIndex
    taken: int = 0
    ids: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    misses: float = 0.0
    expected: float = 0.0


class Copies:
    """Offers copies to the requests of each step."""

    def __init__(self, most: int, vocab_size: int) -> None:
        """
        Args:
            most: tokens of an offer, K - 1.
            vocab_size: other ids, which SGLang may put in the place of pictures, are never copied.
        """
        assert most >= 1, most
        self._most, self._vocab_size = most, vocab_size
        lengths = np.arange(LONGEST + most)
        self._group_of = (np.searchsorted(list(LENGTHS), lengths, side="right") - 1).tolist()
        self._trials = [GUESS] * len(LENGTHS)
        self._hits = [GUESS * chance for chance in LENGTHS.values()]
        self._requests: dict[str, _Request] = {}

    def offers(self, texts: Sequence[Text]) -> list[Offer | None]:
        """Of all requests of a step. Whatever is kept of others is let go."""
        self._requests = {text.name: self._request(text) for text in texts}
        return [self._offer(self._requests[text.name]) for text in texts]

    def _request(self, text: Text) -> _Request:
        """Brought up to date."""
        known = self._requests.get(text.name)
        if known is None or known.prompt is not text.prompt or known.taken > len(text.answer):
            known = _Request(text.prompt, TextIndex(text.prompt[-MOST_TOKENS:]))
        new = list(text.answer[known.taken :])
        known.index.extend(new)
        known.taken += len(new)
        if new:
            self._learn(known, new)
        return known

    def _learn(self, request: _Request, new: Sequence[int]) -> None:
        for copied, token, group in zip(request.ids, new, request.groups, strict=False):
            chance, hit = self._hits[group] / self._trials[group], copied == token
            request.misses = request.misses * KEPT_OF_REQUEST + (not hit)
            request.expected = request.expected * KEPT_OF_REQUEST + 1 - chance
            self._trials[group] = self._trials[group] * KEPT + 1
            self._hits[group] = self._hits[group] * KEPT + hit
            if not hit:
                break
        request.ids, request.groups = [], []

    def _offer(self, request: _Request) -> Offer | None:
        match = request.index.find()
        if match is None:
            return None
        ids = request.index.copy(match.follows, self._most)
        count = next((place for place, token in enumerate(ids) if not 0 <= token < self._vocab_size), len(ids))
        if not count:
            return None
        request.ids, request.groups = ids[:count], self._group_of[match.length : match.length + count]
        more = (request.misses + 1) / (request.expected + 1)  # wrong tokens, compared with all requests
        chances = [
            min(max(1 - (1 - self._hits[group] / self._trials[group]) * more, LEAST), MOST) for group in request.groups
        ]
        return Offer(request.ids, list(accumulate(chances, mul)))

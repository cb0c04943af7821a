"""Copies: where a request's last tokens occurred before in its own text, what followed them there is proposed again.

The text of a request is its prompt and its answer. `TextIndex` finds the place, `Copying` keeps an index and the past
success of each request, and says how likely each copied token is. It learns from every offer, also from those that
no step has verified, because the committed tokens show what a copy would have been worth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice
from operator import mul, neg
from typing import NamedTuple

import numpy as np

GRAMS = (8, 3)
"""Tokens that must equal the last ones. The longer ones are looked for first: among frequent short ones, the place that
goes on as the text does is easily missed."""
LONGEST_MATCH = 32
"""Tokens. Longer matches count as this long."""
PLACES = 8
"""Most recent places of equal tokens that are compared."""
MOST_TOKENS = 1 << 16
"""Tokens at the end of a prompt that are indexed."""
HASH_BASE = 0x9E3779B97F4A7C15
HASH_MASK = (1 << 64) - 1
HASH_POWERS = tuple(pow(HASH_BASE, size, HASH_MASK + 1) for size in GRAMS)


class Match(NamedTuple):
    """An earlier place of a text's last tokens.

    Fields:
        length: tokens that are equal, at most LONGEST_MATCH.
        follows: index of the token behind them.
    """

    length: int
    follows: int


class TextIndex:
    """The places of all short runs of tokens in a growing text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = list(tokens)
        # By size of the run: hash -> index behind its latest place; and, by that index, the one of the place before.
        self._latest: list[dict[int, int]] = []
        self._before: list[list[int]] = []
        self._keys = [_hash(self.tokens[-size:]) for size in GRAMS]  # of the last tokens
        ids = np.array(self.tokens, dtype=np.int64).astype(np.uint64)
        for size in GRAMS:
            latest, before = _index(ids, size)
            self._latest.append(latest)
            self._before.append(before)

    def extend(self, tokens: Iterable[int]) -> None:
        text = self.tokens
        for token in tokens:
            text.append(token)
            end = len(text)
            for i, size in enumerate(GRAMS):
                key = self._keys[i] * HASH_BASE + token + 1
                if end > size:
                    key -= (text[-size - 1] + 1) * HASH_POWERS[i]
                self._keys[i] = key = key & HASH_MASK
                latest, before = self._latest[i], self._before[i]
                if end < size:
                    before.append(-1)
                else:
                    before.append(latest.get(key, -1))
                    latest[key] = end

    def find(self) -> Match | None:
        """The longest match among the latest PLACES of the last 8 tokens, else of the last 3. Ties: the latest."""
        text, end = self.tokens, len(self.tokens)
        for size, before in zip(GRAMS, self._before, strict=True):
            best = Match(size - 1, -1)
            place = before[end]
            for _ in range(PLACES):
                if place < 0:
                    break
                length, most = 0, min(LONGEST_MATCH, place)
                while length < most and text[place - 1 - length] == text[end - 1 - length]:
                    length += 1
                if length > best.length:
                    best = Match(length, place)
                    if length == LONGEST_MATCH:
                        break
                place = before[place]
            if best.follows >= 0:
                return best
        return None

    def copy(self, follows: int, count: int) -> list[int]:
        """The `count` tokens from an index on. At the text's end they go on with themselves: a text that has begun to
        repeat itself goes on so."""
        tokens = self.tokens[follows : follows + count]
        return tokens if len(tokens) == count else list(islice(cycle(tokens), count))


def _hash(tokens: Sequence[int]) -> int:
    key = 0
    for token in tokens:
        key = (key * HASH_BASE + token + 1) & HASH_MASK
    return key


def _index(ids: np.ndarray, size: int) -> tuple[dict[int, int], list[int]]:
    """`TextIndex`'s two tables for runs of `size` tokens, by array operations: [N] uint64 ids."""
    before = np.full(len(ids) + 1, -1, dtype=np.int64)
    runs = len(ids) - size + 1
    if runs < 1:
        return {}, before.tolist()
    keys = np.zeros(runs, dtype=np.uint64)
    for first in range(size):
        keys = keys * np.uint64(HASH_BASE) + ids[first : first + runs] + np.uint64(1)
    ends = np.arange(size, len(ids) + 1)
    order = np.argsort(keys, kind="stable")
    equal = keys[order[1:]] == keys[order[:-1]]
    before[ends[order[1:]][equal]] = ends[order[:-1]][equal]
    return dict(zip(keys.tolist(), ends.tolist(), strict=True)), before.tolist()


@dataclass(frozen=True, slots=True)
class CopyTuning:
    """Tuning values of `Copying`.

    Fields:
        lengths: tokens. Matches from one of them to the next share their chances.
        first_chances: of each of these lengths. First guess of the chance that the token behind a match is right.
        prior_trials: copied tokens. Weight of that guess.
        kept_trials: copied tokens. After this many of a length, older ones weigh 1/e.
        request_misses: wrong tokens. Weight of all other requests beside a request's own success.
        request_trials: copied tokens. After this many of a request, older ones weigh 1/e.
        chances: bounds of a chance.
        longest_wait: steps without a search, at most, after copies whose first token was wrong.
    """

    lengths: tuple[int, ...] = (3, 4, 5, 7, 9, 13, 17, 25, LONGEST_MATCH)
    first_chances: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9, 0.95, 0.97)
    prior_trials: float = 8.0
    kept_trials: float = 2000.0
    request_misses: float = 1.0
    request_trials: float = 64.0
    chances: tuple[float, float] = (0.01, 0.995)
    longest_wait: int = 7


class Offer(NamedTuple):
    """A copy that may be verified.

    Fields:
        ids: the copied tokens.
        reaches: chance that each of them and all before are accepted, falling.
    """

    ids: list[int]
    reaches: list[float]


class Text(NamedTuple):
    """The text of a running request. Its last token is the bonus.

    Fields:
        answer: what the host knows of it; grows in place.
        newest: tokens behind it, which the host gets later.
        room: tokens that a copy may have, because the request has slots for so many rows and no more tokens are asked
            for; None: as many as `Copying.most`.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    newest: Sequence[int] = ()
    room: int | None = None


def best_copies(
    offers: Sequence[Offer | None], drafts: Mapping[int, float], draft: float, least: float
) -> tuple[dict[int, Offer], list[int]]:
    """Which requests get copies, each as far as its tokens pay; and which are drafted.

    Each request gets what promises most beyond its price: a copy, its block, or nothing. If the blocks that are left do
    not bring the draft's fixed price, nobody is drafted.

    Args:
        offers: of all requests.
        drafts: tokens that a request's block brings beyond its price, of those that are to be drafted.
        draft: tokens that the draft's fixed time is worth.
        least: tokens that the time of a row is worth.
    """
    copies, gains = {}, {}
    for request, offer in enumerate(offers):
        if offer is not None and offer.reaches[0] > least:
            count = bisect_left(offer.reaches, -least, key=neg)
            copies[request] = Offer(offer.ids[:count], offer.reaches[:count])
            gains[request] = sum(copies[request].reaches) - least * count
    drafted = [request for request, gain in drafts.items() if gain >= gains.get(request, 0.0)]
    if sum(drafts[request] - gains.get(request, 0.0) for request in drafted) <= draft:
        drafted = []
    for request in drafted:
        copies.pop(request, None)
    return copies, drafted


@dataclass(slots=True)
class _Request:
    """What is kept of a request.

    Fields:
        text: of which `index` has the prompt and `taken` tokens behind it.
        ids, groups: of an offer that is not learned from yet: its tokens, and the group of each one's match length. It
            was made for the end of the indexed text.
        misses, expected_misses: decaying sums over copied tokens.
        waits: steps without a search after the latest copy; `wait`: those that are left.
    """

    text: Text
    index: TextIndex
    taken: int = 0
    ids: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    misses: float = 0.0
    expected_misses: float = 0.0
    waits: int = 0
    wait: int = 0


class Copying:
    """Offers copies to the requests that run, and learns what they are worth."""

    def __init__(self, most: int, vocab_size: int, tuning: CopyTuning | None = None) -> None:
        """
        Args:
            most: tokens of an offer, whatever room a request has.
            vocab_size: ids from here on, which a host may put in the place of pictures, are never copied.
        """
        assert most >= 1, most
        self.most, self._vocab_size, self._tuning = most, vocab_size, tuning or CopyTuning()
        lengths = self._tuning.lengths
        assert lengths[0] <= min(GRAMS) and lengths[-1] == LONGEST_MATCH, lengths
        # By length of the match, which grows by the tokens of an offer and counts as LONGEST_MATCH at most.
        self._group_of = [sum(length >= first for first in lengths[1:]) for length in range(LONGEST_MATCH + most)]
        self._trials = [self._tuning.prior_trials] * len(lengths)
        self._hits = [chance * self._tuning.prior_trials for chance in self._tuning.first_chances]
        self._texts: dict[str, Text] = {}
        self._requests: dict[str, _Request] = {}

    def see(self, texts: dict[str, Text]) -> None:
        """A decode step begins. texts: of all running requests, by name. Whatever is kept of others is let go."""
        self._texts = texts
        for name in [name for name in self._requests if name not in texts]:
            del self._requests[name]

    def offer(self, name: str) -> Offer | None:
        """A copy behind the text of a running request, to be asked for at most once in a step."""
        request = self._request(name)
        if not request.wait:
            self._learn(request, self._texts[name])
        if request.wait:
            request.wait -= 1
            return None
        room = self._texts[name].room
        count = self.most if room is None else min(self.most, room)
        found = request.index.find() if count > 0 else None
        if found is None:
            return None
        ids = request.index.copy(found.follows, count)
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            ids = ids[: next(place for place, token in enumerate(ids) if not 0 <= token < self._vocab_size)]
        tuning, (lowest, highest) = self._tuning, self._tuning.chances
        factor = (request.misses + tuning.request_misses) / (request.expected_misses + tuning.request_misses)
        of_group = [
            min(max(1 - (1 - hits / trials) * factor, lowest), highest)
            for hits, trials in zip(self._hits, self._trials, strict=True)
        ]
        request.ids, request.groups = ids, self._group_of[found.length : found.length + len(ids)]
        return Offer(ids, list(accumulate(map(of_group.__getitem__, request.groups), mul))) if ids else None

    def _request(self, name: str) -> _Request:
        text = self._texts[name]
        request = self._requests.get(name)
        same = request is not None and request.text.prompt is text.prompt and request.text.answer is text.answer
        if request is None or not same or len(text.answer) + len(text.newest) < request.taken:
            request = self._requests[name] = _Request(text, TextIndex(text.prompt[-MOST_TOKENS:]))
        return request

    def _learn(self, request: _Request, text: Text) -> None:
        """Takes the new tokens into the index, and learns from the offer that was made before them."""
        known, tuning = len(text.answer), self._tuning
        new = [*text.answer[request.taken :], *text.newest[max(0, request.taken - known) :]]
        request.index.extend(new)
        request.taken += len(new)
        if not request.ids or not new:
            return
        kept, kept_own = 1 - 1 / tuning.kept_trials, 1 - 1 / tuning.request_trials
        for copied, token, group in zip(request.ids, new, request.groups, strict=False):
            hit = copied == token
            request.misses = request.misses * kept_own + (not hit)
            chance = self._hits[group] / self._trials[group]
            request.expected_misses = request.expected_misses * kept_own + 1 - chance
            self._trials[group] = self._trials[group] * kept + 1
            self._hits[group] = self._hits[group] * kept + hit
            if not hit:
                break
        request.waits = 0 if request.ids[0] == new[0] else min(2 * request.waits + 1, tuning.longest_wait)
        request.wait = request.waits
        request.ids = []

"""Chooses the ids among which the draft chooses: the N likeliest of a vocabulary, by what was seen while serving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# On text of Qwen's tokenizer that a server has not seen, 16,384 ids miss twice as many tokens as 32,768, and their head
# saves 2 % more of a step (docs/benchmarks/cpu-step.md).
AUTO_IDS = 32_768
SMALLEST_AUTO = 2 * AUTO_IDS  # ids of a vocabulary; of fewer, less than half of the head would be saved
AGED_AFTER = 1 << 22  # tokens seen, after which every count is halved: old traffic makes room
KEPT_SHARE = 2  # special ids take at most one of so many places
_RANK_BITS = 20
_KEPT = 1 << 61


class Swaps(NamedTuple):
    """Places whose id changes, and the ids that take them.

    Fields:
        places, ids: [R] int64.
    """

    places: np.ndarray
    ids: np.ndarray


_NONE = Swaps(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def ids_by_default(vocab_size: int) -> int | None:
    """How many ids a draft chooses among if nobody says; None: among all."""
    return AUTO_IDS if vocab_size >= SMALLEST_AUTO else None


def read_ids(text: str, vocab_size: int) -> list[int]:
    """The ids of a file, likeliest first: numbers, separated by blanks or line ends.

    Raises:
        ValueError: the rest of a sentence that begins with the file's name.
    """
    words = text.split()
    wrong = next((word for word in words if not (word.isascii() and word.isdigit()) or int(word) >= vocab_size), None)
    if wrong is not None:
        raise ValueError(f"holds {wrong!r}; allowed: token ids from 0 to {vocab_size - 1}.")
    ids = list(dict.fromkeys(map(int, words)))
    if not ids:
        raise ValueError("holds no token ids.")
    return ids


class DraftVocabulary:
    """N places for ids of a span of the vocabulary, and what was seen of the span's ids.

    Once all swaps are taken, the places hold the kept ids and those with the largest counts; of equal counts, the one
    that comes first in the initial order. Swaps come out in bounded pieces (`next_swaps`), the likeliest first.
    After counts were halved, ids that tied anew keep their places until one of them is seen.

    Ids of the span are numbered from 0.
    """

    def __init__(self, span: int, size: int, kept: Sequence[int] = (), first: Sequence[int] = (), first_id: int = 0):
        """
        Args:
            span: ids of the span, at most 2^20.
            size: N, from 1 to `span`.
            kept: ids of the vocabulary that are always in, the most needed first; at most half of the places.
            first: ids of the vocabulary that are the likeliest before anything is seen, in this order; then the others
                rising, as a BPE's lower ids are the merges of the more frequent pairs.
            first_id: the span's first id in the vocabulary.
        """
        assert 1 <= size <= span <= 1 << _RANK_BITS, (size, span)
        self._span, self._first_id = span, first_id
        order = np.array(list(dict.fromkeys([*self._own(first).tolist(), *range(span)])))
        self._tie = np.empty(span, dtype=np.int64)  # of equal counts, the larger wins
        self._tie[order] = np.arange(span - 1, -1, -1)
        kept_ids = np.array(list(dict.fromkeys(self._own(kept).tolist()))[: size // KEPT_SHARE], dtype=np.int64)
        self._tie[kept_ids] += _KEPT
        self._counts = np.zeros(span, dtype=np.int64)
        self._seen = 0
        self.ids = np.argsort(-self._tie)[:size].astype(np.int64)  # [N], the id at each place
        self._place = np.full(span, -1, dtype=np.int64)
        self._place[self.ids] = np.arange(size)
        self._waiting = _NONE

    def _own(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Those of the span, numbered from 0. Images have ids outside of every vocabulary."""
        own = np.asarray(ids, dtype=np.int64) - self._first_id
        return own[(own >= 0) & (own < self._span)]

    def count(self, ids: Sequence[int] | np.ndarray) -> None:
        """Takes ids of the whole vocabulary into account, of a prompt or of an answer."""
        own = self._own(ids)
        np.add.at(self._counts, own, 1)
        self._seen += len(own)
        if self._seen >= AGED_AFTER:
            self._counts >>= 1
            self._seen >>= 1
        # The best N are now among those that are in, those that were to come in, and those seen: no other has risen.
        others = np.unique(np.concatenate((own[self._place[own] < 0], self._waiting.ids)))
        self._waiting = self._choose(others) if len(others) else _NONE

    def next_swaps(self, most: int) -> Swaps | None:
        """At most `most` places that get other ids now; None if there are none. The caller holds the ids from now on,
        and `ids` says so."""
        if not len(self._waiting.ids):
            return None
        now = Swaps(*(field[:most] for field in self._waiting))
        self._waiting = Swaps(*(field[most:] for field in self._waiting))
        self._place[self.ids[now.places]] = -1
        self.ids[now.places] = now.ids
        self._place[now.ids] = now.places
        return now

    def _choose(self, others: np.ndarray) -> Swaps:
        """What brings the best of the ids that are in and of others, [M] rising, into the N places."""
        ids, size = np.concatenate((self.ids, others)), len(self.ids)
        keys = (self._counts[ids] << _RANK_BITS) + self._tie[ids]  # no two are equal
        out = np.zeros(len(ids), dtype=bool)
        out[np.argpartition(keys, len(others) - 1)[: len(others)]] = True
        places, entering = np.flatnonzero(out[:size]), np.flatnonzero(~out[size:])
        order = np.argsort(-keys[size + entering])
        return Swaps(places[np.argsort(keys[places])], others[entering[order]])

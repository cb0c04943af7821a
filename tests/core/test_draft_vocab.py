"""Which ids a draft chooses among: the most seen, ties by the initial order, special ids always, in bounded pieces."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from sglang_dflash.core import draft_vocab
from sglang_dflash.core.draft_vocab import DraftVocabulary, ids_by_default, read_ids


def _drained(vocabulary: DraftVocabulary, most: int = 3) -> int:
    """Takes all swaps, in pieces of at most `most`; returns how many there were."""
    taken = 0
    while (swaps := vocabulary.next_swaps(most)) is not None:
        assert 1 <= len(swaps.places) == len(swaps.ids) <= most
        taken += len(swaps.ids)
    return taken


def _best(counts: Counter[int], order: list[int], kept: list[int], size: int) -> set[int]:
    """By sorting everything."""
    others = sorted((one for one in order if one not in kept), key=lambda one: -counts[one])  # a stable sort
    return {*kept, *others[: size - len(kept)]}


@pytest.mark.parametrize("seed", range(8))
def test_the_most_seen_are_in(seed: int) -> None:
    """Fails where a count is lost, a tie does not go to the id that comes first in the order, a kept id leaves, or two
    places hold one id; ids of other spans are counted along."""
    rng = random.Random(seed)
    span, size, first_id = 60, 16, 100 * (seed % 2)
    first = rng.sample(range(span), 5) if seed % 3 else []
    order = [*first, *(one for one in range(span) if one not in first)]
    kept = rng.sample(range(span), 4)
    vocabulary = DraftVocabulary(
        span, size, [one + first_id for one in kept], [one + first_id for one in first], first_id
    )
    counts: Counter[int] = Counter()
    assert set(vocabulary.ids.tolist()) == _best(counts, order, kept, size)
    for _ in range(30):
        seen = [rng.choice([rng.randrange(span), rng.randrange(10)]) for _ in range(rng.randrange(12))]
        vocabulary.count(np.array([*(one + first_id for one in seen), first_id - 1, first_id + span, 1 << 40]))
        counts.update(seen)
        if rng.random() < 0.3:
            vocabulary.next_swaps(2)  # a piece alone; more is counted before the next
        else:
            _drained(vocabulary)
            held = vocabulary.ids.tolist()
            assert len(set(held)) == size and set(held) == _best(counts, order, kept, size)


def test_a_swap_names_the_place_that_changes() -> None:
    """Fails where a caller that applies the pieces to its copy ends with other ids than the vocabulary says."""
    vocabulary = DraftVocabulary(50, 10)
    held = vocabulary.ids.copy()
    rng = random.Random(0)
    for _ in range(40):
        vocabulary.count([rng.randrange(50) for _ in range(9)])
        swaps = vocabulary.next_swaps(2)
        if swaps is not None:
            held[swaps.places] = swaps.ids
        assert np.array_equal(held, vocabulary.ids)


def test_the_likeliest_come_first() -> None:
    """Fails where a bounded piece brings rare ids before frequent ones, or evicts likely ids before unlikely ones."""
    vocabulary = DraftVocabulary(50, 10)
    vocabulary.count([9, 30, 31, 31, 32, 32, 32])
    swaps = vocabulary.next_swaps(2)
    assert swaps is not None
    assert swaps.ids.tolist() == [32, 31] and sorted(vocabulary.ids.tolist()) == [*range(7), 9, 31, 32]
    assert _drained(vocabulary) == 1 and 30 in vocabulary.ids and 6 not in vocabulary.ids


def test_seen_ids_that_are_in_change_nothing() -> None:
    """Fails where every step chooses anew although nothing was missed."""
    vocabulary = DraftVocabulary(50, 10)
    vocabulary.count([1, 2, 3, 9, 9])
    assert vocabulary.next_swaps(5) is None
    vocabulary.count([])
    assert vocabulary.next_swaps(5) is None


def test_special_ids_take_at_most_half() -> None:
    """Fails where thousands of unused special tokens leave no room, or the most needed of them are cut."""
    vocabulary = DraftVocabulary(100, 8, kept=[*range(90, 100)])
    assert sorted(vocabulary.ids.tolist()) == [0, 1, 2, 3, 90, 91, 92, 93]


def test_old_counts_fade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where what was seen long ago keeps its place for ever, or halving the counts lets a kept id out."""
    monkeypatch.setattr(draft_vocab, "AGED_AFTER", 64)
    vocabulary = DraftVocabulary(50, 4, kept=[49])
    vocabulary.count([40] * 60 + [41] * 60 + [42] * 60)
    _drained(vocabulary)
    for _ in range(40):
        vocabulary.count([45] * 4 + [46] * 4 + [47] * 4)
        _drained(vocabulary)
    assert sorted(vocabulary.ids.tolist()) == [45, 46, 47, 49]


def test_a_file_of_ids() -> None:
    """Fails where the order of a file is lost, or what is no id passes."""
    assert read_ids("5 3\n3\n\t7\n", 8) == [5, 3, 7]
    for text, words in (("", "no token ids"), ("1 x", "'x'"), ("1 8", "'8'"), ("-1", "'-1'")):
        with pytest.raises(ValueError, match=words):
            read_ids(text, 8)


def test_small_vocabularies_are_whole_by_default() -> None:
    """Fails where a server of a small vocabulary, such as the embedded pair's, drafts among a part of it."""
    assert ids_by_default(1792) is None and ids_by_default(32_000) is None
    count = ids_by_default(151_936)
    assert count is not None and 2 * count <= 151_936

"""Rows of a table for the names that were used last."""

from __future__ import annotations

from sglang_dflash.core.places import Places


def test_the_name_that_was_used_longest_ago_gives_way():
    """Fails where a name in use loses its row, two names share one, or a reused row is not reported as new."""
    places = Places(3)
    assert [places.use(name) for name in "abc"] == [(0, True), (1, True), (2, True)]
    assert places.use("a") == (0, False)
    assert places.use("d") == (1, True)  # the row of b
    assert places.get("b") is None and places.get("a") == 0 and len(places) == 3
    assert list(places.newest_first()) == [1, 0, 2]


def test_when_a_name_was_last_used():
    """Fails where a name that was used again counts as old, or one that gave way as used."""
    places = Places(3)
    for name in "abcda":
        places.use(name)
    assert [places.last_used(name) for name in "abcd"] == [4, -1, 2, 3]

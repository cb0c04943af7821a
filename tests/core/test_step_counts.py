"""What metrics count of steps, against a count request by request."""

from __future__ import annotations

import numpy as np

from sglang_dflash.core.step_counts import (
    ACCEPTED,
    BY_POSITION,
    COUNTERS,
    DRAFT_KV,
    DRAFT_TOKENS,
    DRAFTS,
    LABELS,
    REQUEST_STEPS,
    STEPS,
    StepCounts,
)

BLOCK = 8


def test_counts_of_many_steps():
    """Fails where a count differs from one by hand, at any width and any number of accepted drafts, in plain steps
    too."""
    rng = np.random.default_rng(0)
    counts = StepCounts(BLOCK, BLOCK)
    rows, widths = [], []
    for _ in range(300):
        lens = rng.integers(1, rng.integers(2, BLOCK + 2), size=rng.integers(1, 6))
        accepts = [int(rng.integers(0, count)) for count in lens]
        counts.add(accepts, lens.tolist())
        rows += zip(lens.tolist(), accepts, strict=True)
        widths.append(lens.max())
    expected = {
        (REQUEST_STEPS, ""): len(rows),
        (DRAFTS, ""): sum(count > 1 for count, _ in rows),
        (DRAFT_TOKENS, ""): sum(count - 1 for count, _ in rows),
        (ACCEPTED, ""): sum(accepted for _, accepted in rows),
        **{(BY_POSITION, str(p)): sum(accepted > p for _, accepted in rows) for p in range(BLOCK - 1)},
        **{(STEPS, str(w)): widths.count(w) for w in range(1, BLOCK + 1)},
    }
    assert {(name, label): count for name, label, count in counts.values()} == expected
    assert all(count > 0 for count in expected.values())


def test_every_series_is_there_from_the_start():
    """Fails where a position, a width or a counter appears only once something was counted, so that rates miss it; or
    where a tree's width is missing."""
    counts = StepCounts(BLOCK, 24)
    before = list(counts.values())
    assert {name for name, _, _ in before} == set(COUNTERS) - {DRAFT_KV}
    assert not any(count for _, _, count in before)
    assert all(bool(label) == (name in LABELS) for name, label, _ in before)
    assert [label for name, label, _ in before if name == STEPS] == [str(width) for width in range(1, 25)]
    counts.add([7, 0], [24, 24])
    assert [(name, label) for name, label, _ in counts.values()] == [(name, label) for name, label, _ in before]

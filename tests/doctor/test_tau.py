"""Tau by position, over whole blocks and over steps that verified fewer rows."""

from __future__ import annotations

import pytest

from sglang_dflash.doctor.tau import Tau, ratio, surely_less
from sglang_dflash.serving import Completion

BLOCK = 4


def answer(histogram: list[int], caps: list[int] | None = None) -> Completion:
    steps = sum(histogram)
    meta = {} if caps is None else {"spec_cap_lens_histogram": caps}
    drafted = steps * (BLOCK - 1)
    return Completion(steps=steps, drafted=drafted, accept_histogram=histogram, meta=meta, adapts=caps is not None)


def test_whole_blocks() -> None:
    """Fails where tau differs from the mean commit_len, or a position that no step reached is missing."""
    found = Tau.of([answer([2, 1, 1]), answer([0, 0, 0, 4])])
    assert found.steps == 8 and not found.estimated
    assert found.by_position == (6 / 8, 5 / 8, 4 / 8) and found.tau == 1 + 15 / 8
    assert Tau.of([answer([5])]).by_position == (0.0, 0.0, 0.0)


def test_steps_of_fewer_rows() -> None:
    """Fails where a row that was not verified counts as rejected, or a plain step as one with drafts."""
    caps = [0, 3, 0, 0, 5]  # three plain steps, five whole blocks
    found = Tau.of([answer([3 + 1, 0, 0, 4], caps)])
    assert found.steps == 5 and found.by_position == (0.8, 0.8, 0.8) and not found.estimated
    narrow = Tau.of([answer([0, 4, 0, 0], [0, 0, 4]), answer([0, 0, 0, 2], [0, 0, 0, 0, 2])])
    assert narrow.estimated and narrow.steps == 6 and narrow.by_position == (1.0, 1.0, 1.0)


def test_positions_that_no_step_verified() -> None:
    """Fails where a policy that trims all blocks makes a good draft look poor, or one step decides about a position."""
    found = Tau.of([answer([0, 0, 20], [0, 0, 0, 20])], drafts=5)
    assert found.estimated and found.by_position == (1.0,) * 5
    found = Tau.of([answer([0, 0, 19, 0, 0, 1], [0, 0, 0, 19, 0, 0, 1]), answer([5, 5], [0, 0, 0, 10])], drafts=5)
    assert found.by_position == pytest.approx((25 / 30, 20 / 30, *(20 / 30 * 0.8**more for more in (1, 2, 3))))


def test_shares_never_rise() -> None:
    """Fails where rows that were verified for their good chances make a deep position look better than one before."""
    found = Tau.of([answer([9, 1, 0, 0], [0, 0, 10]), answer([0, 0, 0, 2], [0, 0, 0, 0, 2])])
    assert list(found.by_position) == sorted(found.by_position, reverse=True)


def test_nothing_to_say() -> None:
    """Fails where answers without speculation divide by zero."""
    assert Tau.of([]) == Tau.of([Completion(ids=[1])]) == Tau() and Tau().tau == 0.0
    assert ratio(Tau(), Tau()) == 1.0


@pytest.mark.parametrize(("steps", "sure"), [(4, False), (200, True)])
def test_few_steps_prove_nothing(steps: int, sure: bool) -> None:
    """Fails where a difference of a handful of steps passes for a real one, or a real one for chance."""
    good, poor = Tau.of([answer([steps, 0, 0, 3 * steps])]), Tau.of([answer([2 * steps, 0, 0, 2 * steps])])
    assert surely_less(poor, good) is sure and not surely_less(good, poor)

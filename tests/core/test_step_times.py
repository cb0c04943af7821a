"""Times of forwards by their number of rows."""

from __future__ import annotations

import pytest

from sglang_dflash.core.step_times import OUTLIER, StepTimes, eighths


def seen(times: dict[int, float], **options) -> StepTimes:
    found = StepTimes(**options)
    for rows, seconds in times.items():
        found.see(rows, 99.0)  # the first use of a size counts nothing
        found.see(rows, seconds)
    return found


def of(found: StepTimes, *rows: int) -> list[float]:
    return found.table(max(rows))[list(rows)].tolist()


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (15, 15), (16, 16), (17, 18), (33, 36), (100, 104), (1000, 1024)])
def test_sizes(rows, size):
    """Fails where two numbers of rows that differ by more than an eighth share a time."""
    assert eighths(rows) == size


def test_first_uses_are_left_out():
    """Fails where a step that compiles something makes its size dear for ever."""
    found = StepTimes()
    found.see(8, 30.0)
    assert not len(found)
    found.see(8, 0.5)
    assert len(found) == 1 and of(found, 8) == [0.5]


def test_between_and_beyond_the_measured_sizes():
    found = seen({4: 1.0, 8: 2.0, 16: 4.0})
    assert of(found, 4, 6, 12) == pytest.approx([1.0, 1.5, 3.0])
    assert of(found, 24, 3, 1) == pytest.approx([6.0, 0.75, 0.5])


def test_more_rows_never_take_less():
    """Fails where noise makes a larger forward look cheaper than a smaller one."""
    values = of(seen({4: 1.0, 8: 2.0, 16: 1.0, 32: 4.0}), 4, 8, 12, 16, 32)
    assert values == pytest.approx([1.0, 1.5, 1.5, 1.5, 4.0])


def test_a_disturbed_time_counts_little():
    found = seen({8: 1.0})
    found.see(8, 1000.0)
    assert of(found, 8)[0] < (1 + OUTLIER) / 2 + 0.05
    disturbed = seen({8: 1000.0})
    disturbed.see(8, 1.0)
    assert of(disturbed, 8) == [1.0]


def test_times_follow():
    """Fails where a machine that has become slower is taken for the old one after some hundred steps."""
    found = seen({8: 1.0})
    for _ in range(200):
        found.see(8, 2.0)
    assert of(found, 8)[0] > 1.9


def test_sizes_of_graphs():
    """Fails where rows that one graph serves have different times."""
    found = seen({10: 1.0, 20: 3.0}, size_of=lambda rows: 16 if rows <= 16 else 32)
    found.see(16, 1.0)
    assert of(found, 16, 32) == pytest.approx([1.0, 3.0]) and len(found) == 2

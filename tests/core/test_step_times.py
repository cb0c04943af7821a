"""The expected time of a step, from made-up times of the steps before."""

from __future__ import annotations

import pytest

from sglang_dflash.core.step_times import StepTimes, TimeTuning


def expected(times: StepTimes, rows: int) -> float:
    fixed_s, row_s = times.line()
    return fixed_s + row_s * rows


def test_a_guess_before_the_first_step():
    """Fails where nothing can be planned before the first step has been measured."""
    times = StepTimes()
    assert not times.seen
    assert expected(times, 64) > expected(times, 8) > 0


def test_the_first_step_does_not_count():
    """Fails where one-time work, such as compiling, makes all later steps look slow."""
    times = StepTimes()
    times.observe(8, 5.0)
    assert not times.seen
    times.observe(8, 0.01)
    assert times.seen
    assert expected(times, 8) == pytest.approx(0.01)


def test_times_are_a_line_over_rows():
    """Fails where the regression is wrong: noiseless steps of two sizes must give the line through them."""
    times = StepTimes()
    for _ in range(4000):
        for rows in (8, 64):
            times.observe(rows, 4e-3 + 1e-4 * rows)
    fixed_s, row_s = times.line()
    assert fixed_s == pytest.approx(4e-3, rel=0.05) and row_s == pytest.approx(1e-4, rel=0.05)
    for rows in (8, 24, 64):
        assert expected(times, rows) == pytest.approx(4e-3 + 1e-4 * rows, rel=0.02)


def test_a_few_steps_of_two_sizes_tell_the_rows_apart():
    """Fails where the first guess outlasts the steps that a planner has for learning: it takes turns of wide steps and
    of steps with one row for each request."""
    for row_s in (0.0, 2e-4, 1e-3):
        times = StepTimes()
        for rows in [64, 8] * 6:
            times.observe(rows, 4e-3 + row_s * rows)
        for rows in (8, 64):
            assert expected(times, rows) == pytest.approx(4e-3 + row_s * rows, rel=0.2)


def test_steps_of_one_size_leave_the_guess():
    """Fails where steps that all have the same rows make a slope of nothing, or a division by zero."""
    times = StepTimes()
    for _ in range(100):
        times.observe(16, 0.012)
    fixed_s, row_s = times.line()
    assert row_s == pytest.approx(fixed_s * TimeTuning().prior_row_share)
    assert expected(times, 16) == pytest.approx(0.012)


def test_rows_never_gain_time():
    """Fails where wide steps are expected to be faster than narrow ones because some narrow steps were slow."""
    times = StepTimes()
    for rows, seconds in [(8, 0.02), (64, 0.01)] * 50:
        times.observe(rows, seconds)
    fixed_s, row_s = times.line()
    assert fixed_s > 0 and row_s == 0


def test_no_rows_never_take_negative_time():
    """Fails where steps that grow faster than their rows make the fixed part negative."""
    times = StepTimes()
    for rows, seconds in [(8, 1e-3), (64, 0.02)] * 50:
        times.observe(rows, seconds)
    fixed_s, row_s = times.line()
    assert fixed_s >= 0 and row_s > 0


def test_one_disturbed_step_does_not_count_much():
    """Fails where one step of a second changes the expected time of the next steps by more than 10 %."""
    times = StepTimes()
    for step in range(100):
        times.observe(8 + step % 8, 0.01)
    before = expected(times, 16)
    times.observe(16, 1.0)
    assert expected(times, 16) == pytest.approx(before, rel=0.1)


def test_disturbed_steps_are_forgotten_after_a_shorter_one():
    """Fails where a planner whose first steps were disturbed takes rows for dear for hundreds of steps."""
    times = StepTimes()
    for _ in range(4):
        times.observe(8, 0.3)
    times.observe(8, 0.01)
    assert expected(times, 8) == pytest.approx(0.01)


def test_steps_that_wait_behind_one_that_was_too_short_count_in_full():
    """Fails where one step that ended too early makes all steps that wait with it count as a few times its length."""
    times = StepTimes()
    for seconds in [0.03] * 4 + [0.001] + [0.01] * 12:
        times.observe(8, seconds)
    assert expected(times, 8) > 0.007


def test_old_steps_are_forgotten():
    """Fails where a machine that has become slower, less than a disturbance is, is still taken for the old one."""
    times = StepTimes()
    for _ in range(1000):
        times.observe(8, 0.01)
    for _ in range(1000):
        times.observe(8, 0.02)
    assert expected(times, 8) == pytest.approx(0.02, rel=0.05)


def test_noise_is_averaged():
    """Fails where the latest steps alone set the line."""
    times = StepTimes()
    for step in range(400):
        rows = (8, 24, 64)[step % 3]
        times.observe(rows, (4e-3 + 1e-4 * rows) * (1.3 if step % 2 else 0.7))
    for rows in (8, 24, 64):
        assert expected(times, rows) == pytest.approx(4e-3 + 1e-4 * rows, rel=0.05)


@pytest.mark.parametrize(("rows", "seconds"), [(0, 0.01), (8, 0.0), (8, -1.0)])
def test_no_step_is_refused(rows, seconds):
    """Fails where a step without rows or time, which a clock that stood still gives, spoils the line."""
    with pytest.raises(AssertionError):
        StepTimes().observe(rows, seconds)

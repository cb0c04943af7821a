"""What prefills between decode steps cost, and how often they come."""

from __future__ import annotations

import random

import pytest
from made_up_machines import Machine, World

from sglang_dflash.core.prefill_gaps import LEAST_WORTH, PrefillGaps

FIXED_S, ROW_S = 5e-3, 1e-4


def served(tokens: float, answer: float, steps: int = 2000, seed: int = 0) -> PrefillGaps:
    """After steps of 8 requests that commit `tokens` in all, with answers of `answer` tokens on average."""
    chance, gaps = random.Random(seed), PrefillGaps()
    for _ in range(steps):
        gaps.step(tokens)
        arrived = sum(chance.random() < tokens / 8 / answer for _ in range(8))
        if arrived:
            rows = sum(chance.randint(20, 80) for _ in range(arrived))
            gaps.observe(arrived, rows, (FIXED_S + ROW_S * rows) * chance.uniform(0.9, 1.1))
    gaps.reckon()
    return gaps


def test_nothing_is_charged_before_a_prefill():
    """Fails where a server that was never interrupted plans for prefills."""
    gaps = PrefillGaps()
    gaps.step(8.0)
    gaps.reckon()
    assert gaps.costs() == (0.0, 0.0) and gaps.after(100.0) == 0.0
    assert gaps.price(8.0, 2e-3) == pytest.approx(4000)


@pytest.mark.parametrize(("tokens", "answer"), [(8.0, 40.0), (40.0, 40.0), (40.0, 400.0)])
def test_the_fixed_time_and_the_arrivals_are_found(tokens, answer):
    """Fails where the time of the prompts' rows counts as fixed, or where requests that share a prefill count once."""
    fixed_s, arrivals = served(tokens, answer).costs()
    assert fixed_s == pytest.approx(FIXED_S, rel=0.25)
    assert arrivals == pytest.approx(1 / answer, rel=0.2)


def test_long_prompts_make_prefills_long_not_dear():
    """Fails where a server of long prompts takes the time of their rows for what a prefill costs beside them."""
    gaps, chance = PrefillGaps(), random.Random(0)
    for _ in range(100):
        rows = chance.randint(6000, 10000)
        gaps.step(8.0)
        gaps.observe(1, rows, FIXED_S + ROW_S * rows)
    gaps.reckon()
    assert gaps.costs()[0] < 0.05 * ROW_S * 8000


def test_a_burst_is_forgotten():
    """Fails where a server that was busy once charges its steps for prefills that no longer come."""
    gaps = served(8.0, 20.0, steps=100)
    assert gaps.after(20.0) > 0.5 * FIXED_S
    for _ in range(800):
        gaps.step(8.0)
    gaps.reckon()
    assert gaps.after(20.0) < 0.05 * FIXED_S


def test_a_price_is_bounded():
    """Fails where prefills that take nearly all time make a plan take no row at all."""
    gaps = PrefillGaps()
    for rows in (1, 2, 1):
        gaps.step(100.0)
        gaps.observe(1, rows, 100.0)
    gaps.reckon()
    assert gaps.price(1.0, gaps.after(1.0)) == pytest.approx(1.0 / gaps.after(1.0) / LEAST_WORTH)


def test_which_gaps_are_of_prefills():
    """Fails where chunks of a prompt do not count together, or where the time in which a server was idle or only
    computed a part of a prompt counts as a prefill's."""
    world, seen = World(Machine()), list[tuple[int, int, float]]()
    planner = world.planner()
    planner._prefills.observe = lambda *observed: seen.append(observed)  # type: ignore[method-assign]
    for _ in range(9):
        world.step(planner, dict.fromkeys("ab", 0.5))
    for rows in (30, 20):
        planner.interrupt(rows)
        world.now += 0.25
    world.step(planner, dict.fromkeys("abc", 0.5))
    assert [observed[:2] for observed in seen] == [(1, 50)] and seen[0][2] == pytest.approx(0.5)
    for rows, names in ((40, "de"), (0, "de"), (512, "de"), (9, "d")):
        planner.interrupt(rows)
        world.now += 1.0
        world.step(planner, dict.fromkeys(names, 0.5))
    assert len(seen) == 1


def test_few_long_steps_are_interrupted_less_often():
    """Fails where a prefill after each step costs more than its fixed time, or two steps cost less than one."""
    gaps = served(8.0, 40.0)
    after = [gaps.after(tokens) for tokens in (0.0, 8.0, 16.0, 32.0, 1000.0)]
    assert after == sorted(after) and after[0] == 0.0 and after[-1] == pytest.approx(gaps.costs()[0])
    assert all(2 * gaps.after(tokens) > gaps.after(2 * tokens) for tokens in (8.0, 16.0))


@pytest.mark.parametrize("tokens", [8.0, 40.0])
def test_a_row_that_is_worth_its_price_keeps_the_rate(tokens):
    """Fails where a row above the price lowers the rate of a step, or one below it raises the rate."""
    gaps, step_s = served(8.0, 40.0), 4e-3

    def rate(more: float, more_s: float) -> float:
        return (tokens + more) / (step_s + more_s + gaps.after(tokens + more))

    seconds = step_s + gaps.after(tokens)
    row_s = 1e-6
    worth = gaps.price(tokens, seconds) * row_s
    assert rate(1.02 * worth, row_s) > rate(0.0, 0.0) > rate(0.98 * worth, row_s)

"""The number of rows of packed steps, on made-up machines and drafts."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from sglang_dflash.core.row_budget import Budget, RowBudget

pytestmark = pytest.mark.slow

BLOCK = 16
SIZES = [BLOCK * count for count in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)]
MACHINES: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 1.0,
    "H200": lambda rows: 1.0 + max(0.0, rows - 160) * 0.0045,
    "steep": lambda rows: 0.2 + rows * 0.02,
    "stairs": lambda rows: 1.0 + rows // 128 * 0.4,
}
"""Seconds of a step by the rows of its graph."""
DRAFT_SHARE, LAG = 0.12, 2
FIRST = 50.0
"""The first step of a size compiles kernels, and takes so many times longer."""


class World:
    """Steps of one machine and of one kind of text, told to the budget some steps later."""

    def __init__(self, machine: Callable[[int], float], chance: float, seed: int, noise: float = 0.05) -> None:
        self._machine, self._chance, self._rng, self._noise = machine, chance, random.Random(seed), noise
        self._told: list[tuple[int, Budget, float, np.ndarray | None]] = []
        self._compiled: set[tuple[int, bool]] = set()

    def reach(self, batch: int) -> np.ndarray:
        """[batch * (K-1)]: chances to be right, best first. Some requests are easier than others."""
        chances = [min(0.98, self._chance * self._rng.uniform(0.6, 1.3)) for _ in range(batch)]
        return np.sort(np.concatenate([chance ** np.arange(1, BLOCK) for chance in chances]))[::-1]

    def seconds(self, batch: int, budget: Budget) -> float:
        draft = DRAFT_SHARE * self._machine(batch * BLOCK) if budget.drafts else 0.0
        return self._machine(budget.size) + draft

    def rate(self, batch: int, budget: Budget, steps: int = 64) -> float:
        """Tokens per second, if all steps were such."""
        tokens = [batch + self.reach(batch)[: budget.rows - batch].sum() for _ in range(steps if budget.drafts else 1)]
        return float(np.mean(tokens)) / self.seconds(batch, budget)

    def step(self, budget: RowBudget, batch: int) -> float:
        """Returns the loss against the best choice."""
        chosen = self.play(budget, batch)
        rates = {option: self.rate(batch, option, 8) for option in budget._options(batch)}
        return 1 - rates[chosen] / max(rates.values())

    def play(self, budget: RowBudget, batch: int) -> Budget:
        """One step; returns what was chosen. To know the loss takes much longer."""
        chosen, reach = budget.choose(batch), self.reach(batch)
        seconds = self.seconds(batch, chosen) * self._rng.uniform(1 - self._noise, 1 + self._noise)
        if (first := (chosen.size, chosen.drafts)) not in self._compiled:
            self._compiled.add(first)
            seconds *= FIRST
        self._told.append((batch, chosen, seconds, reach.cumsum() if chosen.drafts else None))
        if len(self._told) > LAG:
            then, taken, took, gains = self._told.pop(0)
            budget.see_time(then, taken, took)
            if gains is not None:
                budget.see_gains(then, gains)
        return chosen


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("chance", [0.2, 0.9])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_finds_the_best_number(machine: str, chance: float, batch: int) -> None:
    """Fails where more than 4 % are lost against the best number of rows, or 10 % while it learns."""
    world, budget = World(MACHINES[machine], chance, seed=1), RowBudget(BLOCK, SIZES)
    losses = [world.step(budget, batch) for _ in range(140)]
    assert np.mean(losses[40:]) < 0.04, np.mean(losses[40:])
    assert np.mean(losses) < 0.1, np.mean(losses)


def test_it_follows_the_number_of_requests_and_the_text() -> None:
    """Fails where what was learned with other requests misleads for long."""
    rng, budget = random.Random(0), RowBudget(BLOCK, SIZES)
    worlds = [World(MACHINES["H200"], chance, seed=2) for chance in (0.3, 0.9)]
    losses = []
    for turn in range(12):
        batch = rng.choice([1, 4, 13, 32, 47, 64])
        losses += [worlds[turn % 2].step(budget, batch) for _ in range(100)]
    assert np.mean(losses) < 0.05, np.mean(losses)


@pytest.mark.parametrize("batch", [1, 8])
def test_drafts_come_back(batch: int) -> None:
    """Fails where a draft that did not pay is never asked again."""
    budget = RowBudget(BLOCK, SIZES)
    useless, useful = World(MACHINES["steep"], 0.05, seed=3), World(MACHINES["steep"], 0.95, seed=3)
    for _ in range(200):
        useless.play(budget, batch)
    assert sum(budget.choose(batch).drafts for _ in range(20)) < 3
    for _ in range(100):
        useful.play(budget, batch)
    losses = [useful.step(budget, batch) for _ in range(100)]
    assert np.mean(losses) < 0.05, np.mean(losses)


@pytest.mark.parametrize("machine", MACHINES)
def test_more_requests_than_ever(machine: str) -> None:
    """Fails where sizes above all measured ones are guessed too slow to be tried."""
    world, budget = World(MACHINES[machine], 0.6, seed=5), RowBudget(BLOCK, SIZES)
    for _ in range(300):
        world.play(budget, 1)
    for _ in range(100):
        world.play(budget, 32)
    losses = [world.step(budget, 32) for _ in range(100)]
    assert np.mean(losses) < 0.05, np.mean(losses)


def test_times_that_fall_again() -> None:
    """Fails where sizes that were slow for a while, at long contexts, are never measured again."""
    slow, fast = (World(machine, 0.8, seed=6) for machine in (lambda rows: 1 + rows * 0.01, lambda rows: 1.0))
    budget = RowBudget(BLOCK, SIZES)
    for _ in range(400):
        slow.play(budget, 16)
    for _ in range(2000):
        fast.play(budget, 16)
    losses = [fast.step(budget, 16) for _ in range(200)]
    assert np.mean(losses) < 0.04, np.mean(losses)


def test_a_reading_that_is_no_number() -> None:
    """Fails where one broken row of a draft spoils all later choices."""
    world, budget = World(MACHINES["flat"], 0.9, seed=7), RowBudget(BLOCK, SIZES)
    for _ in range(50):
        world.step(budget, 8)
    budget.see_gains(8, np.full(8 * (BLOCK - 1), np.nan))
    losses = [world.step(budget, 8) for _ in range(50)]
    assert np.mean(losses) < 0.04, np.mean(losses)


def test_sizes_that_no_graph_has() -> None:
    """Fails where more rows than the largest graph has are cut off, or a size between two graphs is not rounded up."""
    budget = RowBudget(BLOCK, [16, 32, 64])
    assert budget.choose(3) == Budget(48, 64, True)
    assert budget.choose(5) == Budget(80, 80, True)
    assert budget._options(5) == [Budget(5, 5, False), Budget(80, 80, True)]  # more requests than the graphs have
    options = [Budget(3, 16, False), Budget(16, 16, True), Budget(32, 32, True), Budget(48, 64, True)]
    assert budget._options(3) == options


def test_padding_that_has_no_request() -> None:
    """Fails where a batch as large as the largest graph's leaves its padding to the last request, whose block is too
    short for it."""
    budget = RowBudget(BLOCK, [16, 1024])
    assert Budget(64, 1024, False) not in budget._options(64) and Budget(63, 1024, False) in budget._options(63)

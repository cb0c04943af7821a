"""The timers of `tools.measure.profile_step` fit the code that they time."""

from __future__ import annotations

import importlib
import random
from operator import attrgetter

import pytest

from tools.measure.replay import share_right
from tools.measure.step_timers import STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_every_timed_function_exists(stage: str) -> None:
    """Fails where a function that a stage times was renamed or moved: the profiled server would not start."""
    for place in STAGES[stage]:
        module, _, path = place.partition(":")
        assert callable(attrgetter(path)(importlib.import_module(module))), place


@pytest.mark.parametrize(("tau", "block_size"), [(1.5, 8), (4.0, 8), (6.0, 8), (4.0, 16)])
def test_replayed_drafts_are_right_as_often_as_asked(tau: float, block_size: int) -> None:
    """Fails where replayed drafts commit another mean number of tokens than a measurement says."""
    right, drawn = share_right(tau, block_size), random.Random(5)
    steps = [
        1 + next((depth for depth in range(block_size - 1) if drawn.random() > right), block_size - 1)
        for _ in range(20_000)
    ]
    assert sum(steps) / len(steps) == pytest.approx(tau, rel=0.02)

"""The timers of `tools.measure.profile_step` fit the code that they time."""

from __future__ import annotations

import importlib
from operator import attrgetter

import pytest

from tools.measure.step_timers import STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_every_timed_function_exists(stage: str) -> None:
    """Fails where a function that a stage times was renamed or moved: the profiled server would not start."""
    for place in STAGES[stage]:
        module, _, path = place.partition(":")
        assert callable(attrgetter(path)(importlib.import_module(module))), place

"""What the rehearsals of graphs share: the pair's answers without speculation, and the bug that a server has."""

from __future__ import annotations

from pathlib import Path

import pytest
from arms import Baseline
from baseline import baseline, tokenizer

from sglang_dflash.serving import Completion

__all__ = ["baseline", "tokenizer"]  # fixtures
REQUESTS = 9


@pytest.fixture(scope="session")
def prompts(baseline: Baseline) -> list[list[int]]:
    return baseline.long_prompts[:REQUESTS]


@pytest.fixture(scope="session")
def off(baseline: Baseline) -> dict[str, list[Completion]]:
    """What each prompt gets alone with speculation off and no graphs: up to the end of the context, and so on."""
    return {
        "plain": baseline.long_answers[:REQUESTS],
        "regex": baseline.regex_answers,
        "penalties": baseline.penalised_answers[:3],
    }


@pytest.fixture(scope="module")
def bug(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that names the bug which the server has for the moment."""
    path = tmp_path_factory.mktemp("bug") / "name"
    path.write_text("")
    return path

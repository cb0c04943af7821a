"""Which width policy a server gets, and what it refuses."""

from __future__ import annotations

import pytest

from sglang_dflash.core.width import AdaptiveWidth, FullWidth
from sglang_dflash.host import widths


@pytest.mark.parametrize(
    ("value", "device", "tp_size", "policy"),
    [
        (None, "cpu", 1, AdaptiveWidth),
        ("adaptive", "cpu", 1, AdaptiveWidth),
        ("full", "cpu", 1, FullWidth),
        (None, "cpu", 2, FullWidth),
        (None, "cuda", 1, FullWidth),
    ],
)
def test_the_policy_of_a_server(monkeypatch, value, device, tp_size, policy):
    """Fails where widths adapt with graphs of one size or on several ranks, or do not adapt where they can."""
    monkeypatch.delenv(widths.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(widths.VARIABLE, value)
    widths.check(device, tp_size)
    assert type(widths.choose_width_policy(8, device, tp_size)) is policy


def test_simulated_acceptance_has_whole_blocks(monkeypatch):
    """Fails where a mean commit_len of 4 would be drawn in blocks of 2."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4")
    monkeypatch.delenv(widths.VARIABLE, raising=False)
    assert type(widths.choose_width_policy(8, "cpu", 1)) is FullWidth


@pytest.mark.parametrize(
    ("value", "device", "tp_size", "words"),
    [
        ("4", "cpu", 1, "'4'; allowed: adaptive, full"),
        ("adaptive", "cpu", 2, "needs --tp-size 1, not 2, because ranks could choose different widths. Use full"),
        ("adaptive", "cuda", 1, "needs --device cpu, not cuda, because an accelerator"),
    ],
)
def test_what_cannot_be_had_is_refused(monkeypatch, value, device, tp_size, words):
    """Fails where an unknown or impossible policy is silently replaced by another."""
    monkeypatch.setenv(widths.VARIABLE, value)
    with pytest.raises(ValueError, match=words):
        widths.check(device, tp_size)

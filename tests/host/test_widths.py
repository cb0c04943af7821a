"""Which policy a server gets by its variable, and what is refused."""

from __future__ import annotations

import pytest

from sglang_dflash.host import widths


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in (widths.WIDTH, *widths.GONE, "SGLANG_SIMULATE_ACC_LEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("value", "device", "asked"),
    [
        (None, "cpu", "auto"),
        ("", "cpu", "auto"),
        ("auto", "cpu", "auto"),
        ("adaptive", "cpu", "auto"),
        ("1", "cpu", 1),
        ("8", "cpu", 8),
        ("full", "cpu", "full"),
        (None, "cuda", "full"),
        ("full", "cuda", "full"),
        ("auto", "cuda", "auto"),
        (None, "npu", "full"),
    ],
)
def test_what_is_asked(monkeypatch, value, device, asked):
    """Fails where a value means another policy, or a device gets one whose graphs it lacks."""
    if value is not None:
        monkeypatch.setenv(widths.WIDTH, value)
    widths.check(device, 8)
    assert widths.asked(device) == asked
    assert widths.trims_on_device(device) == (device == "cuda" and asked == "auto")


def test_the_old_name_is_said(monkeypatch, caplog):
    """Fails where a server takes the name of earlier versions without a word."""
    monkeypatch.setenv(widths.WIDTH, "adaptive")
    widths.check("cpu", 8)
    assert "adaptive is called auto now" in caplog.text


def test_simulated_acceptance_has_whole_blocks(monkeypatch):
    """Fails where a mean commit_len of 4 would be drawn in blocks of 2."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4")
    assert widths.asked("cpu") == "full"
    monkeypatch.setenv(widths.WIDTH, "2")
    with pytest.raises(ValueError, match="SGLANG_SIMULATE_ACC_LEN unset"):
        widths.check("cpu", 8)


@pytest.mark.parametrize(
    ("name", "value", "device", "words"),
    [
        (widths.WIDTH, "9", "cpu", "'9'; allowed: auto, full, or a number from 1 to 8"),
        (widths.WIDTH, "0", "cpu", "'0'; allowed: auto, full, or a number from 1 to 8"),
        (widths.WIDTH, "wide", "cpu", "'wide'; allowed: auto, full, or a number from 1 to 8"),
        (widths.WIDTH, "4", "cuda", "SGLANG_DFLASH_WIDTH=4 needs --device cpu, not cuda"),
        (widths.WIDTH, "4", "cuda", "because an accelerator.*Use full, or auto"),
        (widths.WIDTH, "auto", "npu", "needs --device cpu, not npu, because an accelerator"),
        ("SGLANG_DFLASH_TURN_MS", "0", "cpu", "SGLANG_DFLASH_TURN_MS is '0', but it is gone: each"),
        ("SGLANG_DFLASH_TREE", "8", "cuda", "SGLANG_DFLASH_TREE is '8', but it is gone: the rows"),
        ("SGLANG_DFLASH_COPY", "1", "cpu", "SGLANG_DFLASH_COPY is '1', but it is gone: nothing"),
    ],
)
def test_what_cannot_be_had_is_refused(monkeypatch, name, value, device, words):
    """Fails where an unknown or impossible value is silently replaced by another."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        widths.check(device, 8)

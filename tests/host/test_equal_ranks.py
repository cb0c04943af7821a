"""What ranks compare before their first collective."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_dflash import ops
from sglang_dflash.host.worker import equal_ranks
from sglang_dflash.host.worker.equal_ranks import difference, steering


def test_a_difference_is_named() -> None:
    """Fails where ranks that differ in a variable, the draft or the package go on, or the sentence lacks a value."""
    one = {"SGLANG_DFLASH_WIDTH": "full", "sglang-dflash": "0.1.0", "the draft's config": "abc"}
    assert difference([one, dict(one), dict(one)]) is None
    sentence = difference([one, one, {**one, "SGLANG_DFLASH_WIDTH": "4"}])
    assert sentence is not None
    assert all(word in sentence for word in ("SGLANG_DFLASH_WIDTH", "rank 0 has full", "rank 2 has 4", "all nodes"))
    unset = {name: value for name, value in one.items() if name != "SGLANG_DFLASH_WIDTH"}
    assert "rank 1 has unset" in str(difference([one, unset])) and "rank 0 has unset" in str(difference([unset, one]))


def test_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a variable that steers is not compared, or a path of one machine is."""
    monkeypatch.setenv("SGLANG_DFLASH_WIDTH", "4")
    monkeypatch.setenv("SGLANG_DFLASH_NATIVE_LIBRARY", "/somewhere")
    found = steering(SimpleNamespace(block_size=8), ops.choose_kernels("cpu"))
    assert found["SGLANG_DFLASH_WIDTH"] == "4" and "SGLANG_DFLASH_NATIVE_LIBRARY" not in found
    assert found != steering(SimpleNamespace(block_size=16), ops.choose_kernels("cpu"))
    assert found != steering(SimpleNamespace(block_size=8), SimpleNamespace(best_log_probs=equal_ranks.difference))

"""The warning of steps that wait for the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_dflash.host.start import waiting

WAITS = SimpleNamespace(needs_cpu_seq_lens=AttentionBackend.needs_cpu_seq_lens)
RUNS_ON = SimpleNamespace(needs_cpu_seq_lens=False)


@pytest.mark.parametrize(
    ("target", "draft", "device", "named"),
    [
        (WAITS, WAITS, "cuda", "of the target and of the draft takes"),
        (RUNS_ON, WAITS, "cuda", "of the draft takes"),
        (RUNS_ON, RUNS_ON, "cuda", None),
        (WAITS, WAITS, "cpu", None),
    ],
    ids=["both wait", "the draft waits", "none waits", "a CPU"],
)
def test_who_waits_is_named(target, draft, device, named, caplog):
    """Fails where a user learns only from a profile that no step runs ahead, or is warned for nothing."""
    waiting.announce((target, draft), device)
    assert (named in caplog.text) if named else not caplog.text

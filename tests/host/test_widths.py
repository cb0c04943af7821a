"""Which policy a server gets by its variable, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_dflash.host.start import widths


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in (widths.WIDTH, widths.TREE, widths.COPIES, *widths.GONE, "SGLANG_SIMULATE_ACC_LEN"):
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
        ("4", "cuda", 4),
        (None, "npu", "full"),
    ],
)
def test_what_is_asked(monkeypatch, value, device, asked):
    """Fails where a value means another policy, or a device gets one whose graphs it lacks."""
    if value is not None:
        monkeypatch.setenv(widths.WIDTH, value)
    widths.check(device, 8)
    assert widths.asked(device) == asked
    assert widths.on_graphs(device) == (device == "cuda")


def test_the_old_name_is_said(monkeypatch, caplog):
    """Fails where a server takes the name of earlier versions without a word."""
    monkeypatch.setenv(widths.WIDTH, "adaptive")
    widths.check("cpu", 8)
    assert "adaptive is called auto now" in caplog.text


def test_simulated_acceptance_has_whole_blocks(monkeypatch):
    """Fails where a mean commit_len of 4 would be drawn in blocks of 2."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4")
    assert widths.asked("cpu") == "full"
    widths.check_server(config_of(device="cpu"), None)
    monkeypatch.setenv(widths.WIDTH, "2")
    with pytest.raises(ValueError, match="SGLANG_DFLASH_WIDTH=2 needs SGLANG_SIMULATE_ACC_LEN unset"):
        widths.check_server(config_of(device="cpu"), None)


def config_of(**changed: Any) -> SimpleNamespace:
    fields = {"enable_deterministic_inference": False, "enable_lora": False, "lora_paths": None, "device": "cuda"}
    decode = SimpleNamespace(backend=changed.pop("decode_graphs", Backend.FULL))
    fields |= {"cuda_graph_config": SimpleNamespace(decode=decode), "speculative_num_draft_tokens": 8}
    fields |= {f"linear_attn_{name}backend": None for name in ("", "decode_", "verify_")}
    return SimpleNamespace(**(fields | changed))


@pytest.mark.parametrize("value", ["auto", "4"])
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"device": "cpu", "enable_lora": True}, None),
        ({"device": "npu"}, "--device cuda or cpu, not npu"),
        ({"enable_deterministic_inference": True}, "without --enable-deterministic-inference"),
        ({"enable_lora": True}, "without --enable-lora"),
        ({"decode_graphs": Backend.DISABLED}, "CUDA graphs of decode steps"),
        ({"SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0"),
        ({"recurrent": "mamba"}, "gated delta nets"),
        ({"recurrent": "gdn"}, None),
        ({"recurrent": "gdn", "linear_attn_backend": "flashinfer"}, "--linear-attn-backend triton, not flashinfer"),
        ({"recurrent": "gdn", "linear_attn_verify_backend": "cutedsl"}, "triton, not cutedsl"),
    ],
)
def test_what_other_rows_cannot_have_is_refused(monkeypatch, value, changed, words):
    """Fails where a server would start with rows that it cannot honour, or refuses one that did not ask."""
    for name in [name for name in changed if name.isupper()]:
        monkeypatch.setenv(name, changed[name])
    recurrent = changed.get("recurrent")
    monkeypatch.setattr(widths, "mambaish_config", lambda target: recurrent)
    monkeypatch.setattr(widths, "hybrid_gdn_config", lambda target: recurrent if recurrent == "gdn" else None)
    names = {*vars(config_of()), "decode_graphs"}
    config = config_of(**{name: own for name, own in changed.items() if name in names})
    for whole in ("full", "8"):
        monkeypatch.setenv(widths.WIDTH, whole)
        widths.check_server(config, None)
    monkeypatch.setenv(widths.WIDTH, value)
    if words is None:
        widths.check_server(config, None)
    else:
        with pytest.raises(ValueError, match=f"SGLANG_DFLASH_WIDTH={value} needs.*{words}.*Use full"):
            widths.check_server(config, None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"device": "cuda"}, "--device cpu, not cuda"),
        ({"disable_overlap_schedule": False}, "without overlap scheduling"),
        ({"tp_size": 2}, "--tp-size 1, not 2"),
        ({"SGLANG_DFLASH_WIDTH": "auto"}, None),
        ({"SGLANG_DFLASH_WIDTH": "full"}, "SGLANG_DFLASH_WIDTH=auto, not full"),
        ({"SGLANG_DFLASH_WIDTH": "4"}, "SGLANG_DFLASH_WIDTH=auto, not 4"),
        ({"SGLANG_SIMULATE_ACC_LEN": "4"}, "SGLANG_DFLASH_WIDTH=auto, not full"),
    ],
)
def test_where_nothing_can_be_copied(monkeypatch, changed, words):
    """Fails where a server would start that cannot copy, or where one is refused that can, or that does not ask."""
    for name in [name for name in changed if name.isupper()]:
        monkeypatch.setenv(name, changed[name])
    monkeypatch.setattr(widths, "mambaish_config", lambda target: None)
    fields = {"device": "cpu", "disable_overlap_schedule": True, "tp_size": 1}
    config = config_of(**(fields | {name: own for name, own in changed.items() if name in fields}))
    for value in ("", "0"):
        monkeypatch.setenv(widths.COPIES, value)
        widths.check(config.device, 8)
        widths.check_server(config, None)
        assert not widths.copies()
    monkeypatch.setenv(widths.COPIES, "1")
    widths.check(config.device, 8)
    assert widths.copies()
    if words is None:
        widths.check_server(config, None)
    else:
        with pytest.raises(ValueError, match=f"SGLANG_DFLASH_COPIES is 1, which needs.*{words}.*allowed here: 0"):
            widths.check_server(config, None)


@pytest.mark.parametrize(
    ("name", "value", "device", "words"),
    [
        (widths.WIDTH, "9", "cpu", "'9'; allowed: auto, full, or a number from 1 to 8"),
        (widths.WIDTH, "0", "cpu", "'0'; allowed: auto, full, or a number from 1 to 8"),
        (widths.WIDTH, "wide", "cpu", "'wide'; allowed: auto, full, or a number from 1 to 8"),
        ("SGLANG_DFLASH_TURN_MS", "0", "cpu", "SGLANG_DFLASH_TURN_MS is '0', but it is gone: each"),
        ("SGLANG_DFLASH_COPY", "1", "cpu", "SGLANG_DFLASH_COPY is '1', but it is gone: SGLANG_DFLASH_COPIES=1"),
        ("SGLANG_DFLASH_COPIES", "yes", "cpu", "SGLANG_DFLASH_COPIES is 'yes'; allowed: 0 or 1"),
    ],
)
def test_what_cannot_be_had_is_refused(monkeypatch, name, value, device, words):
    """Fails where an unknown or impossible value is silently replaced by another."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        widths.check(device, 8)

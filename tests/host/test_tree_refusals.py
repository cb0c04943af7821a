"""Which servers cannot verify trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_dflash.host.start.widths import FULL, TREE, WIDTH, asked
from sglang_dflash.host.worker import trees

PLAIN_DRAFT = SimpleNamespace(selector=None, domino=None)
TARGET = {"is_hybrid_swa": False, "attention_arch": AttentionArch.MHA, "is_multimodal": False}
TARGET |= {"has_attention_sinks": False}


def config_of(**changed: Any) -> SimpleNamespace:
    decode = SimpleNamespace(backend=changed.pop("decode_graphs", Backend.FULL))
    fields = {"device": "cuda", "attention_backend": "fa3", "prefill_attention_backend": None, "page_size": 1}
    fields |= {"decode_attention_backend": None, "cuda_graph_config": SimpleNamespace(decode=decode), "tp_size": 1}
    fields |= {"dp_size": 1, "enable_dp_attention": False, "enable_deterministic_inference": False}
    fields |= {"enable_lora": False, "lora_paths": None, "kv_cache_dtype": "auto"}
    fields |= {"enable_return_routed_experts": False, "enable_return_indexer_topk": False}
    return SimpleNamespace(**(fields | changed))


@pytest.fixture(autouse=True)
def _sixteen(monkeypatch):
    monkeypatch.delenv(WIDTH, raising=False)
    monkeypatch.setenv(TREE, "16")
    monkeypatch.setattr(trees, "mambaish_config", lambda target: getattr(target, "mamba", None))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_that_can(device):
    """Fails where a plain server is refused, or its chains are not whole blocks."""
    trees.check(config_of(device=device), SimpleNamespace(**TARGET), PLAIN_DRAFT, 8)
    assert asked(device) == FULL


@pytest.mark.parametrize("value", ["8", "65", "many", "-1", ""])
def test_numbers_of_rows(value, monkeypatch):
    """Fails where a tree that is no larger than a block, or too large, or no number, passes."""
    monkeypatch.setenv(TREE, value)
    with pytest.raises(ValueError, match=f"SGLANG_DFLASH_TREE is '{value}'; allowed: unset, or 9 to 64 rows"):
        trees.check(config_of(), SimpleNamespace(**TARGET), PLAIN_DRAFT, 8)


@pytest.mark.parametrize(
    ("changed", "target", "words"),
    [
        ({"attention_backend": "triton"}, {}, "--attention-backend fa3, not triton"),
        ({"decode_attention_backend": "flashinfer"}, {}, "--attention-backend fa3, not fa3, flashinfer"),
        ({"decode_graphs": Backend.DISABLED}, {}, "CUDA graphs of decode steps"),
        ({"page_size": 16}, {}, "--page-size 1, not 16"),
        ({"tp_size": 2}, {}, "--tp-size 1, not 2"),
        ({"dp_size": 2, "enable_dp_attention": True}, {}, "--dp-size 1, not 2"),
        ({"enable_deterministic_inference": True}, {}, "without --enable-deterministic-inference"),
        ({"lora_paths": ["a"]}, {}, "without --enable-lora"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "--kv-cache-dtype auto, not fp8_e4m3"),
        ({"enable_return_routed_experts": True}, {}, "neither experts nor indices"),
        ({}, {"mamba": True}, "without recurrent state"),
        ({}, {"is_multimodal": True}, "of text alone"),
        ({}, {"has_attention_sinks": True}, "without attention sinks"),
        ({}, {"is_hybrid_swa": True}, "without sliding windows and MLA"),
        ({}, {"attention_arch": AttentionArch.MLA}, "without sliding windows and MLA"),
    ],
)
def test_what_trees_cannot_have(changed, target, words):
    """Fails where a server would start that cannot honour what is asked."""
    with pytest.raises(ValueError, match=f"SGLANG_DFLASH_TREE=16 needs .*{words}.*Unset it"):
        trees.check(config_of(**changed), SimpleNamespace(**(TARGET | target)), PLAIN_DRAFT, 8)


def test_other_variables(monkeypatch):
    """Fails where trees are asked for beside a policy of widths, or a draft gives one id for a row."""
    selector = SimpleNamespace(selector=object(), domino=None)
    with pytest.raises(ValueError, match="several ids for a row"):
        trees.check(config_of(), SimpleNamespace(**TARGET), selector, 8)
    for name, value in (("SGLANG_SIMULATE_ACC_LEN", "3"), ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=name):
            patch.setenv(name, value)
            trees.check(config_of(), SimpleNamespace(**TARGET), PLAIN_DRAFT, 8)
    monkeypatch.setenv(WIDTH, "auto")
    with pytest.raises(ValueError, match="needs SGLANG_DFLASH_WIDTH=full or unset"):
        trees.check(config_of(), SimpleNamespace(**TARGET), PLAIN_DRAFT, 8)

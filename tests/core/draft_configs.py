"""A published draft config, changes of it, and the sentence by which a config is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from sglang_dflash.core.draft_config import DraftConfig

# As published: z-lab/Qwen3-8B-DFlash-b16.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def config_of(dflash: dict[str, Any] | None = None, without: tuple[str, ...] = (), **top: Any) -> dict[str, Any]:
    """The published config with changes; keys in `without` are first removed from both levels."""
    config = copy.deepcopy(PUBLISHED)
    for key in without:
        config.pop(key, None)
        config["dflash_config"].pop(key, None)
    config.update(top)
    config["dflash_config"].update(dflash or {})
    return config


def refusal_of(config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as refused:
        DraftConfig.from_dict(config)
    sentence = str(refused.value)
    assert sentence.endswith(".") and "\n" not in sentence, sentence
    return sentence

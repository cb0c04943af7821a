"""Dummy targets of real and small shapes with block-16 drafts: configs and a tokenizer, no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sglang_dflash.core.draft_config import build_target_layer_ids
from sglang_dflash.serving import TINY_TARGET

BLOCK_SIZE = 16
_SHARED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "use_cache": True,
}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-8b": _SHARED
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "llama-3.1-8b": _SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_hidden_layers": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
}
"""The values of the published config.json files."""
_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_window_layers": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "bos_token_id": 2046,
    "eos_token_id": 2047,
}
_QWEN3_600M = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,  # of the embedded pair; the published config has 40960
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
TARGETS |= {
    "qwen3-0.6b": TARGETS["qwen3-8b"] | _QWEN3_600M,
    "qwen3-small": TARGETS["qwen3-8b"] | _SMALL,
    "llama-small": TARGETS["llama-3.1-8b"] | _SMALL,
}
DRAFTS = {
    "qwen3-8b": (5, 5, 151669),
    "llama-3.1-8b": (5, 5, 128002),
    "qwen3-0.6b": (3, 4, 151669),
    "qwen3-small": (5, 5, 2045),
    "llama-small": (5, 5, 2045),
}
"""Layers and taps of each target's draft, and its mask: a reserved id of the vocabulary."""


def draft_config(model: str) -> dict[str, Any]:
    """config.json in the published layout: a Qwen3 draft of the target's width, taps by `build_target_layer_ids`."""
    target, (layers, taps, mask) = TARGETS[model], DRAFTS[model]
    kept = ("intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "vocab_size")
    return {key: target[key] for key in (*_SHARED, *kept)} | {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": mask,
            "target_layer_ids": list(build_target_layer_ids(target["num_hidden_layers"], taps)),
        },
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_target_layers": target["num_hidden_layers"],
        "sliding_window": None,
        "use_sliding_window": False,
    }


def make_pair(model: str, folder: Path) -> tuple[Path, Path]:
    """Writes the folders of target and draft for `--load-format dummy`, each time anew; returns both."""
    paths = folder / model / "target", folder / model / "draft"
    for path, config in zip(paths, (TARGETS[model], draft_config(model)), strict=True):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(TINY_TARGET / file, path / file)
    return paths

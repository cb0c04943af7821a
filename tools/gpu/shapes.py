"""Shapes of published targets and drafts, as configs of checkpoints without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET

ROPE = {"rope_theta": 1e6, "rope_type": "default"}
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "head_dim": 128,
    "dtype": "bfloat16",
}
EIGHT_B = DENSE | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
HYBRID: dict[str, Any] = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "rope_type": "default",
    },
    "rope_theta": 1e7,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
    "dtype": "bfloat16",
}
TWENTY_SEVEN_B = HYBRID | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "linear_num_value_heads": 48,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
}
MOE = HYBRID | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
TARGETS = {"8b": EIGHT_B, "27b": TWENTY_SEVEN_B, "35b-a3b": MOE}


def _draft_of(target: dict[str, Any], layers: int, block_size: int) -> dict[str, Any]:
    """A draft as z-lab trains them: Qwen3's layers, five taps."""
    depth, hidden = target["num_hidden_layers"], target["hidden_size"]
    taps = [round(1 + place * (depth - 5) / 4) for place in range(5)]
    return DENSE | {
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps},
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_target_layers": depth,
        "vocab_size": target["vocab_size"],
    }


def write(shape: str, folder: Path) -> tuple[Path, Path]:
    """Writes the configs of a shape. Returns the folders of target and draft; for `tiny`, those of the tiny pair."""
    if shape == "tiny":
        return Path(TINY_TARGET), Path(TINY_DRAFT)
    target = TARGETS[shape]
    pair = {"target": target, "draft": _draft_of(target, 5 if shape != "35b-a3b" else 8, 16)}
    for name, config in pair.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder / "target", folder / "draft"

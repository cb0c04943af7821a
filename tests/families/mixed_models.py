"""Configs of further tiny targets: Gemma 3, MiMo-V2 and Qwen2 MoE."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

CONFIG = Path(__file__).parent / "remote" / "configuration_mimo_v2.py"
WINDOW = 24
LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA_3: dict[str, Any] = {
    **LAYERS,
    "intermediate_size": 96,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
GEMMA_3_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
    "vision_use_head": False,
}
QWEN2_MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "intermediate_size": 96,
}
# Sliding layers have twice the KV heads, and sinks; keys are wider than values; the first layer has no experts.
MIMO_V2: dict[str, Any] = {
    **LAYERS,
    "v_head_dim": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "attention_value_scale": 0.7,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    },
}


def publish_gemma_3(checkpoint: Path) -> None:
    """Names the weights of the vision tower as published checkpoints do, which SGLang reads."""
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(checkpoint).items()
    }
    save_file(named, checkpoint, metadata={"format": "pt"})


def publish_mimo_v2(folder: Path) -> None:
    """Gives the config the keys and the class of published checkpoints, which SGLang reads."""
    settings = json.loads((folder / "config.json").read_text())
    slides = [int(kind == "sliding_attention") for kind in settings["layer_types"]]
    settings |= {
        "hybrid_layer_pattern": slides,
        "moe_layer_freq": [int(kind == "sparse") for kind in settings["mlp_layer_types"]],
        "swa_num_attention_heads": settings["num_attention_heads"],
        "swa_num_key_value_heads": 2 * settings["num_key_value_heads"],
        "swa_head_dim": settings["head_dim"],
        "swa_v_head_dim": settings["v_head_dim"],
        "sliding_window_size": WINDOW - 1,  # SGLang takes it as the distance of the last key that a row sees
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": settings["rms_norm_eps"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "partial_rotary_factor": 0.5,
        "rope_theta": 500000.0,
        "swa_rope_theta": 10000.0,
        "architectures": ["MiMoV2FlashForCausalLM"],
        "auto_map": {"AutoConfig": f"{CONFIG.stem}.MiMoV2FlashConfig"},
    }
    shutil.copy2(CONFIG, folder)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))

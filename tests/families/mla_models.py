"""Configs of tiny targets with latent attention (MLA)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 16,  # of the rotary part, as transformers has it
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "intermediate_size": 96,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# Two dense layers, then two with experts, as in a published checkpoint.
DEEPSEEK_V3 = {**LATENT, **EXPERTS, "first_k_dense_replace": 2, "num_nextn_predict_layers": 0, "rope_parameters": YARN}
# As Moonlight: queries without a latent space of their own, positions without YaRN.
PLAIN_QUERIES = {**DEEPSEEK_V3, "q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
GLM_FLASH = {
    **LATENT,
    **EXPERTS,
    "n_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "first_k_dense_replace": 1,  # the same for SGLang
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
KIMI_LINEAR: dict[str, Any] = {
    **{name: value for name, value in LATENT.items() if name != "q_lora_rank"},
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],  # counted from 1
        "full_attn_layers": [2, 4],
    },
    "mla_use_nope": True,
    "moe_intermediate_size": 48,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "num_shared_experts": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.4,
    "q_lora_rank": None,
    "bos_token_id": None,
}
MLA_FAMILIES = ("DeepSeek-V3", "Moonlight", "GLM-4.7-Flash", "Kimi-Linear", "Kimi K2.5")


def name_dense_layers(checkpoint: Path) -> None:
    """Published checkpoints of Kimi-Linear call a dense layer `mlp`, and SGLang reads no other name; transformers
    writes the name of the layers with experts."""
    weights = load_file(checkpoint)
    sparse = {name.split(".block_sparse_moe.")[0] for name in weights if ".experts." in name}
    named = {
        name if name.split(".block_sparse_moe.")[0] in sparse else name.replace("block_sparse_moe", "mlp"): weight
        for name, weight in weights.items()
    }
    save_file(named, checkpoint, metadata={"format": "pt"})

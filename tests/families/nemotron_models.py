"""Tiny configs of Nemotron-H, and its checkpoints in the layout that NVIDIA publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAMBA_2: dict[str, Any] = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 40,
    "conv_kernel": 4,
    "chunk_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": None,  # the pattern's length
}
# M: Mamba-2, *: attention, -: a dense MLP, E: experts.
NEMOTRON_H = {**MAMBA_2, "hybrid_override_pattern": "M-*M-"}
NEMOTRON_H_MOE: dict[str, Any] = {
    **MAMBA_2,
    "hybrid_override_pattern": "ME*ME",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 40,
    "routed_scaling_factor": 2.5,
}
# Our name of a family -> the settings above.
NEMOTRON_FAMILIES = {"Nemotron-H": NEMOTRON_H, "Nemotron-H MoE": NEMOTRON_H_MOE}


def publish_nemotron_h(folder: Path) -> None:
    """Published configs name the layers by `hybrid_override_pattern` and the groups twice; SGLang reads no other.
    transformers writes a list with layer types of its own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kinds = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    layers = config.pop("layers_block_type")
    for key in ("mtp_layers_block_type", "layer_types"):
        config.pop(key, None)
    config["hybrid_override_pattern"] = "".join(kinds[layer] for layer in layers)
    config["num_hidden_layers"] = len(layers)
    config["mamba_n_groups"] = config["n_groups"]
    path.write_text(json.dumps(config, indent=2))

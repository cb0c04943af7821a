"""The published checkpoint layout: a new draft's config, and saving a trained draft so that every engine loads it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_dflash.reference import (
    DFLASH2_ARCHITECTURES,
    PLAIN_ARCHITECTURE,
    DFlashConfig,
    DFlashDraftModel,
    build_target_layer_ids,
)
from sglang_dflash.training.options import TrainOptions


def new_config(target: Any, options: TrainOptions, mask_token_id: int) -> DFlashConfig:
    """The draft's config: width and heads from the target; depth, block size, taps and windows from the options.

    Args:
        target: the target's text config.

    Raises:
        ValueError: the taps do not fit the target.
    """
    if getattr(target, "per_layer_config", None):  # Gemma 4: its full layers have other heads; most layers' are taken
        target = deepcopy(target)
        target.allow_global_per_layer_attribute_access = True
    count = options.num_taps or options.layers
    taps = options.taps or build_target_layer_ids(target.num_hidden_layers, count)
    if len(set(taps)) < count and options.taps is None:
        raise ValueError(
            f"For {count} taps of a target with {target.num_hidden_layers} layers, the formula gives {list(taps)}, "
            "which repeats layers; give fewer with --num-taps, or list them with --taps."
        )
    intermediate_size = getattr(target, "intermediate_size", None)
    if intermediate_size is None and hasattr(target, "moe_intermediate_size"):
        intermediate_size = 3 * target.hidden_size  # of experts alone; the ratio is that of Qwen3's dense models
    if intermediate_size is None:
        raise ValueError(
            f"The config of the target (type {target.model_type!r}) has no intermediate_size, which the draft needs."
        )
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some targets have one rope per kind of layer
    heads = target.num_attention_heads
    config = DFlashConfig(
        architectures=[PLAIN_ARCHITECTURE],
        attention_bias=False,
        block_size=options.block_size,
        dflash_config={"mask_token_id": mask_token_id, "target_layer_ids": list(taps)},
        num_target_layers=target.num_hidden_layers,
        num_hidden_layers=options.layers,
        max_window_layers=options.layers,
        layer_types=options.layer_types,
        use_sliding_window=options.sliding_window is not None,
        sliding_window=options.sliding_window,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
        # Rope scaling stretches what the target learned at short range. The draft learns the full range directly.
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        max_position_embeddings=target.max_position_embeddings,
        initializer_range=getattr(target, "initializer_range", 0.02),
        vocab_size=target.vocab_size,
        eos_token_id=target.eos_token_id,
        bos_token_id=getattr(target, "bos_token_id", None),
        tie_word_embeddings=False,
    )
    if options.is_causal is not None:
        config.is_causal = options.is_causal
    if options.head == "dflash2":
        config = dflash2_config(config, target.vocab_size, options)
    config.draft.check_target(target.num_hidden_layers, target.hidden_size, target.vocab_size)
    return config


def dflash2_config(config: DFlashConfig, vocab_size: int, options: TrainOptions) -> DFlashConfig:
    """A plain draft's config with the convolutions and the selector of the options.

    Raises:
        ValueError: the options do not fit the draft or the vocabulary.
    """
    added = {"selector_rank": options.selector_rank, "selector_top_k": options.selector_top_k}
    if options.conv_kernel_size:
        added |= {"conv_kernel_size": options.conv_kernel_size, "conv_group_size": options.conv_group_size}
    made = DFlashConfig.from_dict(config.to_dict())
    made.architectures, made.vocab_size = [DFLASH2_ARCHITECTURES[0]], vocab_size
    made.dflash_config = config.dflash_config | added
    _ = made.draft  # raises
    return made


def with_dflash2_head(draft: DFlashDraftModel, vocab_size: int, options: TrainOptions) -> DFlashDraftModel:
    """A DFlash2 draft with the weights of a plain one, which drafts the same until it is trained."""
    made = DFlashDraftModel(dflash2_config(draft.config, vocab_size, options))
    unknown = made.load_state_dict(draft.state_dict(), strict=False).unexpected_keys
    assert not unknown, unknown
    return made


def save_draft(draft: DFlashDraftModel, folder: Path) -> None:
    """Writes bfloat16 `model.safetensors` and `config.json` under the names of the published checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in draft.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it readable by its owner only
    config = draft.config.to_dict() | {"dtype": "bfloat16"}
    # Readers that do not know rope_parameters look for these two keys.
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None}
    for key in ("_name_or_path", "transformers_version", "auto_map"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

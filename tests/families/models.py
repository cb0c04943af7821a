"""Tiny random targets of the families that we serve, and a random draft for each, in the layout of checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.serving import TINY_TARGET
from sglang_dflash.training import TrainOptions
from sglang_dflash.training.layout import new_config, save_draft

BLOCK_SIZE = 8
SCALE = 0.12  # of random weights: large enough for answers that do not repeat one token
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

COMMON: dict[str, Any] = {
    "vocab_size": 1792,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 1790,
    "pad_token_id": 1788,
}
GDN: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,  # the same for SGLang, which does not read layer_types
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


@dataclass(frozen=True, slots=True)
class Family:
    """One family of targets.

    Fields:
        config: of its tiny target.
        recurrent: whether it keeps recurrent state.
    """

    config: Callable[[], PreTrainedConfig]
    recurrent: bool


FAMILIES = {
    "Qwen3.5": Family(
        lambda: Qwen3_5TextConfig(
            **COMMON, **GDN, intermediate_size=96, rope_parameters=dict(MROPE), tie_word_embeddings=True
        ),
        recurrent=True,
    ),
    "Qwen3.5 MoE": Family(
        lambda: Qwen3_5MoeTextConfig(
            **COMMON, **GDN, **MOE, shared_expert_intermediate_size=32, rope_parameters=dict(MROPE)
        ),
        recurrent=True,
    ),
    "Qwen3-Next": Family(
        lambda: Qwen3NextConfig(
            **COMMON,
            **GDN,
            **MOE,
            intermediate_size=96,
            shared_expert_intermediate_size=32,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
        recurrent=True,
    ),
    "Qwen3 MoE": Family(lambda: Qwen3MoeConfig(**COMMON, **MOE, intermediate_size=96), recurrent=False),
}


def make_target(family: str, folder: Path) -> Path:
    """Writes a random target of the family in float32, with the embedded pair's tokenizer."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(FAMILIES[family].config()).float()
    for weight in model.parameters():
        if weight.dim() >= 2:
            torch.nn.init.normal_(weight, std=SCALE)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy2(TINY_TARGET / name, folder / name)
    return folder


def make_draft(target: Path, folder: Path) -> Path:
    """Writes a random draft for the target: one sliding and one full layer, so that both kinds run."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = AutoModelForCausalLM.from_pretrained(target).config.get_text_config()
    if not hasattr(text, "intermediate_size"):
        text.intermediate_size = 96
    options = TrainOptions(
        target=str(target),
        data=(__file__,),
        output=str(folder),
        layers=2,
        block_size=BLOCK_SIZE,
        taps=(0, 2),
        sliding_window=64,
        sliding_layers=1,
    )
    torch.manual_seed(12)
    save_draft(DFlashDraftModel(new_config(text, options, tokenizer.mask_token_id)), folder)
    return folder

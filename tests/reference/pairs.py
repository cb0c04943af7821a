"""Small pairs with random weights. Their vocabulary is so small that an untrained draft is often right."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from sglang_dflash.reference import DFlashConfig, DFlashDraftModel

VOCABULARY = 5
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # A wide range: logits differ so much that rounding never decides between two tokens.
    "initializer_range": 0.3,
}
TARGET_LAYERS = 4


def make_target(kind: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A causal model of four layers; `kind` is llama or qwen3."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(seed)
    config = config_class(**{**SMALL, "num_hidden_layers": TARGET_LAYERS, "tie_word_embeddings": False, **options})
    return model_class(config).eval()


def draft_config(dflash: dict[str, Any] | None = None, **options: Any) -> DFlashConfig:
    """Two layers over two taps, block 4; None drops a key of `dflash_config`."""
    section = {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [0, 2], **(dflash or {})}
    section = {key: value for key, value in section.items() if value is not None}
    return DFlashConfig(**{**SMALL, "num_hidden_layers": 2, "block_size": 4, "dflash_config": section, **options})


def make_draft(dflash: dict[str, Any] | None = None, seed: int = 1, **options: Any) -> DFlashDraftModel:
    """A draft of random weights, norms included."""
    torch.manual_seed(seed)
    draft = DFlashDraftModel(draft_config(dflash, **options)).eval()
    for name, weight in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return draft


def random_ids(length: int, seed: int = 2, requests: int = 1) -> torch.Tensor:
    """[requests, length] int64"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (requests, length), generator=generator)


def pad(prompts: list[list[int]], left: bool = False, value: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, [B, P] each."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), value)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if left else slice(0, len(prompt))
        ids[row, place] = torch.tensor(prompt)
        mask[row, place] = 1
    return ids, mask

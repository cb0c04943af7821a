"""Reads a draft's trained mask embedding, the file `mask_embedding.pt` beside its weights."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from sglang_dflash.core.draft_config import DraftConfig

MASK_EMBEDDING_FILE = "mask_embedding.pt"


def read_mask_embedding(path: str | Path, draft: DraftConfig) -> torch.Tensor:
    """What the draft was trained to see at a block's masks, in place of the target's embedding of the mask token.

    The file holds a tensor, or an object as SGLang 0.5.23 reads it: `embedding`, `mask_token_id` and `per_position`.

    Args:
        draft: the draft's config, `mask_token_id` known.

    Returns:
        [1, H] if all masks are alike, else [K-1, H]: one row for each of a block's rows 1..K-1. On the CPU, in the
        file's dtype.

    Raises:
        ValueError: one sentence on what the file holds and what is allowed.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read as tensors of torch ({type(error).__name__}).") from None
    embedding, trained_id = saved, draft.mask_token_id
    if isinstance(saved, Mapping):
        embedding, trained_id = saved.get("embedding"), saved.get("mask_token_id", draft.mask_token_id)
    if not isinstance(embedding, torch.Tensor) or not embedding.is_floating_point():
        raise ValueError(f"{path} holds no floating-point tensor, alone or under the key 'embedding'.")
    if trained_id != draft.mask_token_id:
        raise ValueError(
            f"{path} was trained with mask_token_id {trained_id}, and the draft's dflash_config.mask_token_id is "
            f"{draft.mask_token_id}: they must be equal."
        )
    hidden, block = draft.hidden_size, draft.block_size
    shape = tuple(embedding.shape)
    if shape in ((hidden,), (1, hidden)):
        return embedding.view(1, hidden)
    if shape not in ((block - 1, hidden), (block, hidden)):
        raise ValueError(
            f"{path} holds an embedding of shape {list(shape)}; allowed: [{hidden}], or one row for each of a block's "
            f"positions, [{block - 1}, {hidden}] or, with the anchor's, [{block}, {hidden}]."
        )
    return embedding[-(block - 1) :]

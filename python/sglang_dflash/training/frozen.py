"""The target as the trainer needs it: features of clean text, embedding and head, all frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.reference import FeatureTaps, end_token_ids, text_config
from sglang_dflash.training.layout import new_config
from sglang_dflash.training.options import TrainOptions

_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# Config keys by which a target scales embeddings or logits.
_SCALINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier", "lm_head_multiplier")


class FrozenTarget:
    """A Hugging Face causal language model that is read and never changed."""

    def __init__(self, name: str, dtype: str, device: torch.device) -> None:
        """
        Args:
            dtype: "auto" means the checkpoint's dtype; on a CPU it means float32, which is faster there.

        Raises:
            ValueError: the target cannot be loaded, or its head is not one matrix without bias.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"--target-dtype is {dtype}; it must be one of {', '.join(_DTYPES)}.")
        chosen = _DTYPES[dtype] or ("auto" if device.type != "cpu" else torch.float32)
        try:
            place = {} if device.type == "cpu" else {"device_map": {"": device}}  # never whole in CPU memory
            self.model = AutoModelForCausalLM.from_pretrained(name, dtype=chosen, **place).eval()
            self.tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"The target {name} cannot be loaded: {str(error).splitlines()[0]}") from None
        self.model.requires_grad_(False)
        self.config = text_config(self.model)
        self.end_ids = set(end_token_ids(self.model))
        self._decoder = self.model.get_decoder()
        head = self.model.get_output_embeddings()
        if getattr(head, "weight", None) is None or getattr(head, "bias", None) is not None:
            raise ValueError(
                f"The output head of the target {name} is not one matrix without bias; a draft cannot share it."
            )
        self._head_weight = head.weight

    def _exact(self) -> torch.autocast:
        """Turns autocast off: the target runs in its own dtype, whatever the draft's precision is."""
        return torch.autocast(self._head_weight.device.type, enabled=False)

    @torch.no_grad()
    def features(self, ids: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        """Context features [B, T, taps * H] of clean ids [B, T] int64, padded on the right."""
        # Attention is causal and padding comes last, so the clean positions need no mask.
        with self._exact(), FeatureTaps(self.model, taps) as recorded:
            self._decoder(input_ids=ids, use_cache=False)
            return recorded.take()

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., H] of ids [...], the draft's input for its block."""
        with self._exact():
            return self.model.get_input_embeddings()(ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits: [N, H] -> [N, V]; gradients flow to `hidden` only."""
        with self._exact():
            return F.linear(hidden.to(self._head_weight.dtype), self._head_weight)


def check_target(options: TrainOptions) -> None:
    """Checks the options against the target's config and tokenizer, before any weight is read.

    Raises:
        ValueError: the target is not supported, or taps, mask token or shape do not fit it.
    """
    try:
        config = AutoConfig.from_pretrained(options.target).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(options.target)
    except (OSError, ValueError) as error:
        raise ValueError(f"The target {options.target} cannot be read: {str(error).splitlines()[0]}") from None
    layers = config.num_hidden_layers
    outside = [tap for tap in options.taps or () if not 0 <= tap < layers - 1]
    if outside:
        raise ValueError(f"--taps has {outside}; a draft can read layers 0 to {layers - 2} of the target's {layers}.")
    scaled = [key for key in _SCALINGS if getattr(config, key, None) not in (None, 1, 1.0)]
    if scaled:
        raise ValueError(
            f"The target {options.target} scales embeddings or logits ({', '.join(scaled)}); "
            "the trainer does not support that."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"The target {options.target} has no fast tokenizer; the trainer needs its offsets to locate the answers."
        )
    if options.init is None:
        new_config(config, options, mask_token_id(tokenizer, config.vocab_size, options.mask_token_id))


def mask_token_id(tokenizer: Any, rows: int, chosen: int | None) -> int:
    """The mask token's id: as given, else the tokenizer's mask token, else the id after the tokenizer's last one.

    Args:
        rows: number of rows of the target's embedding.
        chosen: --mask-token-id.

    Raises:
        ValueError: there is no such id, or it is outside the embedding.
    """
    if chosen is None:
        chosen = tokenizer.mask_token_id
    if chosen is None:
        chosen = max(tokenizer.get_vocab().values()) + 1
        if chosen >= rows:
            raise ValueError(
                f"The target's tokenizer uses all {rows} rows of the embedding and has no mask token; "
                "give --mask-token-id, a token that occurs in no text."
            )
    if not 0 <= chosen < rows:
        raise ValueError(f"--mask-token-id is {chosen}; it must be a row of the target's embedding, 0 to {rows - 1}.")
    return chosen

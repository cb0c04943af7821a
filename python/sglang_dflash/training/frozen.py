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


# What a target's config may do to embeddings and logits beyond the two matrices.
_SCALINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier", "lm_head_multiplier")


class FrozenTarget:
    """A Hugging Face causal language model that is read and never changed."""

    def __init__(self, name: str, dtype: str, device: torch.device) -> None:
        """
        Args:
            dtype: "auto": as saved on an accelerator, float32 on a CPU, where it is the faster one.

        Raises:
            ValueError: it cannot be loaded, or has no dense head; one sentence.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"--target-dtype is {dtype}; it must be one of {', '.join(_DTYPES)}.")
        chosen = _DTYPES[dtype] or ("auto" if device.type != "cpu" else torch.float32)
        try:
            place = {} if device.type == "cpu" else {"device_map": {"": device}}  # never whole in host memory
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
            raise ValueError(f"The target {name} has no head of one matrix without bias; a draft cannot share it.")
        self._head_weight = head.weight

    def _exact(self) -> torch.autocast:
        """The target runs in its own dtype, whatever the draft's forward is cast to."""
        return torch.autocast(self._head_weight.device.type, enabled=False)

    @torch.no_grad()
    def features(self, ids: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        """Context features [B, T, taps * H] of clean ids [B, T] int64, padded on the right."""
        # Attention is causal and padding comes last: no mask is needed for what is read.
        with self._exact(), FeatureTaps(self.model, taps) as recorded:
            self._decoder(input_ids=ids, use_cache=False)
            return recorded.take()

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[..., H]: as the draft gets its block."""
        with self._exact():
            return self.model.get_input_embeddings()(ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, V]; gradients pass to `hidden` alone."""
        with self._exact():
            return F.linear(hidden.to(self._head_weight.dtype), self._head_weight)


def check_target(options: TrainOptions) -> None:
    """Raises ValueError, before any weight is read, where taps, mask or shape do not fit the target's config."""
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
            f"The target {options.target} scales embeddings or logits ({', '.join(scaled)}), and this trainer does not."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"The target {options.target} has a slow tokenizer, which gives no offsets to find answers by."
        )
    if options.init is None:
        new_config(config, options, mask_token_id(tokenizer, config.vocab_size, options.mask_token_id))


def mask_token_id(tokenizer: Any, rows: int, chosen: int | None) -> int:
    """The id that the draft learns to fill: as given, the tokenizer's mask, or the first id it does not use.

    Args:
        rows: of the target's embedding.

    Raises:
        ValueError: there is none, or it is no row of the embedding.
    """
    if chosen is None:
        chosen = tokenizer.mask_token_id
    if chosen is None:
        chosen = max(tokenizer.get_vocab().values()) + 1
        if chosen >= rows:
            raise ValueError(
                f"The target's tokenizer uses all {rows} rows of its embedding and names no mask token: "
                "give --mask-token-id, a token that no text has."
            )
    if not 0 <= chosen < rows:
        raise ValueError(f"--mask-token-id is {chosen}; it must be a row of the target's embedding, 0 to {rows - 1}.")
    return chosen

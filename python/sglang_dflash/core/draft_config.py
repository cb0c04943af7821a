"""The draft checkpoint's `config.json` as a validated value: every key a plain DFlash draft may carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

PLAIN_ARCHITECTURE = "DFlashDraftModel"
# A key of `dflash_config` that asks for more than the plain head -> the head's name.
SPECIAL_HEADS = {
    "projector_type": "a projector",
    "conv_kernel_size": "DFlash2's convolution",
    "selector_rank": "DFlash2's selector",
    "gru_hidden_dim": "Domino's projector",
    "markov_rank": "DSpark's Markov head",
    "enable_confidence_head": "DSpark's confidence head",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled values",
    "use_gemma_norm": "Gemma's norms",
}
USE_BUILTIN = "start with SGLANG_DFLASH_WORKER=builtin, which may serve it"


class LayerAttention(NamedTuple):
    """What a block row of one draft layer sees.

    Fields:
        causal: only rows before it in the block, or all of them.
        window: of HF size w, keys less than w positions behind a row are seen; None: all.
    """

    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A plain DFlash draft.

    Fields:
        block_size: rows the draft was trained to fill, anchor included.
        mask_token_id: None where only `mask_token` names it.
        mask_token: the mask's text in the target's tokenizer.
        target_layer_ids: 0-based target layers whose residual output is a context feature.
        hidden_size: of draft and target alike.
        num_layers, num_heads, num_kv_heads, intermediate_size: of the draft.
        attention: of each draft layer. `is_causal` decides for all layers where it is given; without it, sliding
            layers are causal in the block and full ones are not (z-lab/dflash, SpecForge, SGLang 0.5.23).
    """

    block_size: int
    mask_token_id: int | None
    mask_token: str | None
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    attention: tuple[LayerAttention, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Reads `config.json` as published (z-lab layout).

        Raises:
            ValueError: a sentence that names the key, what came and what is allowed.
        """
        dflash = config.get("dflash_config") or {}
        if not isinstance(dflash, Mapping):
            raise ValueError(f"dflash_config is {dflash!r}; it must be an object.")
        _refuse_special_heads(config, dflash)
        num_layers, num_heads = _positive(config, "num_hidden_layers"), _positive(config, "num_attention_heads")
        # Older checkpoints keep at top level what newer ones keep in dflash_config.
        merged = {**config, **{key: value for key, value in dflash.items() if value is not None}}
        mask_token_id, mask_token = merged.get("mask_token_id"), merged.get("mask_token")
        if mask_token_id is None and mask_token is None:
            raise ValueError("The draft's config names no mask: dflash_config.mask_token_id must be a token id.")
        if mask_token_id is not None and (type(mask_token_id) is not int or mask_token_id < 0):
            raise ValueError(f"dflash_config.mask_token_id is {mask_token_id!r}; it must be a token id.")
        return cls(
            block_size=_positive(merged, "block_size"),
            mask_token_id=mask_token_id,
            mask_token=mask_token,
            target_layer_ids=_target_layer_ids(merged, num_layers),
            hidden_size=_positive(config, "hidden_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_positive({"num_key_value_heads": num_heads, **config}, "num_key_value_heads"),
            intermediate_size=_positive(config, "intermediate_size"),
            attention=_layer_attention(merged, num_layers),
        )

    def check_target(self, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        """Raises ValueError, in one sentence, where this draft cannot draft for a target of that shape."""
        if hidden_size != self.hidden_size:
            raise ValueError(
                f"The draft's hidden_size is {self.hidden_size} and the target's {hidden_size}: "
                "they must be equal, since the draft uses the target's embedding and head."
            )
        # The last layer's output exists only normed (`hidden_states[-1]`); the host has no place to capture it.
        outside = [layer for layer in self.target_layer_ids if not 0 <= layer < num_layers - 1]
        if outside:
            raise ValueError(
                f"dflash_config.target_layer_ids has {outside}, but a draft can read layers 0 to {num_layers - 2} "
                f"of the target's {num_layers}."
            )
        if self.mask_token_id is None or self.mask_token_id >= vocab_size:
            raise ValueError(
                f"dflash_config.mask_token_id is {self.mask_token_id}, outside the target's {vocab_size} token ids."
            )

    def check_ranks(self, tp_size: int) -> None:
        """Raises ValueError, in one sentence, where the draft cannot be split over so many tensor-parallel ranks."""
        sizes = {"num_attention_heads": self.num_heads, "intermediate_size": self.intermediate_size}
        if tp_size % self.num_kv_heads:  # else each rank has one, which others may have, too
            sizes["num_key_value_heads"] = self.num_kv_heads
        for key, size in sizes.items():
            if size % tp_size:
                raise ValueError(f"--tp-size is {tp_size} and the draft's {key} {size}: the former must divide it.")


def build_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The published formula for taps where a checkpoint names none (z-lab/dflash, `dflash/model.py`)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(f"The draft's config has {key}={value!r}; it must be a positive integer.")
    return value


def _refuse_special_heads(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if architectures != [PLAIN_ARCHITECTURE]:
        raise ValueError(
            f"The draft's architectures are {architectures}; this worker serves ['{PLAIN_ARCHITECTURE}']: "
            f"{USE_BUILTIN}."
        )
    for key, head in SPECIAL_HEADS.items():
        value = dflash.get(key) or config.get(key)
        if value:
            raise ValueError(f"The draft has {head} ({key}={value!r}), which we do not serve: {USE_BUILTIN}.")
    lilicorr = sorted(key for key in dflash if key.startswith("lilicorr"))
    if lilicorr:
        raise ValueError(f"The draft has LiLiCorr's reranker ({lilicorr[0]}), which we do not serve: {USE_BUILTIN}.")
    if config.get("quantization_config"):
        raise ValueError(f"The draft is quantised (quantization_config), which we do not serve: {USE_BUILTIN}.")


def _layer_attention(config: Mapping[str, Any], num_layers: int) -> tuple[LayerAttention, ...]:
    full, sliding = "full_attention", "sliding_attention"
    layer_types, slides = config.get("layer_types"), config.get("use_sliding_window", False)
    if layer_types is None:
        # As the Qwen3 config, which hosts read a draft's config with, fills it in.
        first = num_layers
        if slides and config.get("sliding_window", True) is not None:
            first = config.get("max_window_layers", 28)
            if type(first) is not int or first < 0:
                raise ValueError(f"The draft's max_window_layers is {first!r}; it must be a number of layers.")
        layer_types = [sliding if index >= first else full for index in range(num_layers)]
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(layer_type not in (full, sliding) for layer_type in layer_types)
    ):
        raise ValueError(
            f"The draft's layer_types is {layer_types}; it must hold {num_layers} entries, each "
            f"'{full}' or '{sliding}'."
        )
    if sliding in layer_types and not slides:
        raise ValueError(
            f"The draft's layer_types has '{sliding}' and use_sliding_window is {slides!r}; it must be true, or the "
            "host drops the window."
        )
    window = _positive(config, "sliding_window") if sliding in layer_types else None
    is_causal = config.get("is_causal")
    if is_causal is not None and type(is_causal) is not bool:
        raise ValueError(f"The draft's is_causal is {is_causal!r}; it must be true, false or absent.")
    return tuple(
        LayerAttention(
            causal=layer_type == sliding if is_causal is None else is_causal,
            window=window if layer_type == sliding else None,
        )
        for layer_type in layer_types
    )


def _target_layer_ids(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    layer_ids = config.get("target_layer_ids")
    if layer_ids is None:
        layer_ids = list(build_target_layer_ids(_positive(config, "num_target_layers"), num_layers))
    if not isinstance(layer_ids, list) or not layer_ids or any(type(i) is not int for i in layer_ids):
        raise ValueError(f"dflash_config.target_layer_ids is {layer_ids!r}; it must be a list of layer numbers.")
    # The host captures each layer once and in the model's order, whatever the list says.
    if any(second <= first for first, second in pairwise(layer_ids)):
        raise ValueError(f"dflash_config.target_layer_ids is {layer_ids}; the layer numbers must rise.")
    return tuple(layer_ids)

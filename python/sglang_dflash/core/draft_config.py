"""Reads and validates the `config.json` of a draft checkpoint: all keys that a DFlash or DFlash2 draft may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from sglang_dflash.core.draft_formats import EMBEDDING, PLAIN_ARCHITECTURE, ZLAB, read_published
from sglang_dflash.core.draft_heads import (
    DFLASH2_ARCHITECTURES,
    Convolution,
    Domino,
    Selector,
    read_convolution,
    read_domino,
    read_selector,
)

ARCHITECTURES = (PLAIN_ARCHITECTURE, *DFLASH2_ARCHITECTURES)
# Config keys, at either level, that ask for a head that we do not serve -> the name of what they ask for.
SPECIAL_HEADS = {
    "projector_type": "a projector",  # other than Domino's
    "markov_rank": "DSpark's Markov head",
    "enable_confidence_head": "DSpark's confidence head",
}
NESTED, TOP_LEVEL = ("attention_sink_bias", "attention_value_scale"), ("use_gemma_norm",)  # where SGLang reads them
DTYPES = ("bfloat16", "float16", "float32")
QWEN3_HEAD_DIM = 128  # the default of transformers' Qwen3Config, with which SGLang reads most drafts' configs
DSPARK_KEYS = ("markov_rank", "enable_confidence_head")
USE_BUILTIN = "start with SGLANG_DFLASH_WORKER=builtin, which may serve it"
USE_DSPARK = "start with --speculative-algorithm DSPARK, an algorithm of its own in SGLang"


class LayerAttention(NamedTuple):
    """The keys that a block row sees in one draft layer.

    Fields:
        causal: whether a row sees, of its block, only itself and the rows before it. Otherwise it sees all of them.
        window: size w as in Hugging Face configs: a row sees keys less than w positions behind it. None: no limit.
    """

    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A DFlash draft; a DFlash2 draft, which has a selector and mostly convolutions; or a Domino draft.

    Fields:
        layout: who writes such a config; see `draft_formats`.
        block_size: K, rows the draft was trained to fill, anchor included.
        anchor_first: whether row k predicts the token behind its own position, so that K rows give K drafts. Otherwise
            row k predicts the token at its position, and the anchor's row predicts nothing.
        mask_token_id: None if the config has only `mask_token`.
        mask_token: the mask's text in the target's tokenizer.
        target_layer_ids: 0-based target layers whose residual output is a context feature; -1: the embedding.
        hidden_size: of the draft; the target's must be equal.
        num_layers, num_heads, num_kv_heads, head_dim, intermediate_size: of the draft.
        attention: one value per draft layer. If the config has `is_causal`, it holds for all layers. Otherwise sliding
            layers are causal in the block and full ones are not (z-lab/dflash, SpecForge, SGLang 0.5.23).
        gemma_norms: whether a norm multiplies by 1 + weight instead of the weight.
        value_scale: factor of all attention values; None for 1.
        attention_sinks: whether each attention head has a learned sink: a logit that takes part in the softmax and
            has no value.
        head_vocab_size: ids among which a head of the draft's own chooses (`d2t`); None: it has the target's head.
        attention_bias: whether the projections of the attention have biases.
        dtype: of the weights, as torch names it; None: the config does not say.
        quantization: what the config says of quantised weights (`quantization_config`); None if they are plain.
        convolution: around attention and MLP of every layer; None: none.
        selector: chooses each draft given the one before it; None: each draft is its row's argmax.
        domino: corrects each row's logits by the drafts before it; None: as they are.
    """

    block_size: int
    mask_token_id: int | None
    mask_token: str | None
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    attention: tuple[LayerAttention, ...]
    layout: str = ZLAB
    anchor_first: bool = False
    head_vocab_size: int | None = None
    dtype: str | None = field(default=None, compare=False)
    attention_bias: bool = False
    gemma_norms: bool = False
    value_scale: float | None = None
    attention_sinks: bool = False
    quantization: Mapping[str, Any] | None = None
    convolution: Convolution | None = None
    selector: Selector | None = None
    domino: Domino | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Reads `config.json` in any published layout (see `draft_formats`).

        Raises:
            ValueError: one sentence with the key, its value and what is allowed.
        """
        config, layout = read_published(config)
        dflash = config.get("dflash_config") or {}
        _refuse_special_heads(config, dflash)
        num_layers, num_heads = _positive(config, "num_hidden_layers"), _positive(config, "num_attention_heads")
        hidden_size = _positive(config, "hidden_size")
        # Older checkpoints have some keys at top level that newer ones have in dflash_config, which wins.
        merged = {**config, **{key: value for key, value in dflash.items() if value is not None}}
        mask_token_id, mask_token = merged.get("mask_token_id"), merged.get("mask_token")
        if mask_token_id is None and mask_token is None:
            raise ValueError("The draft's config names no mask: dflash_config.mask_token_id must be a token id.")
        if mask_token_id is not None and (type(mask_token_id) is not int or mask_token_id < 0):
            raise ValueError(f"dflash_config.mask_token_id is {mask_token_id!r}; it must be a token id.")
        anchor_first = _flag(merged, "sample_from_anchor")
        selector, domino = read_selector(config, dflash), read_domino(config, merged)
        if anchor_first and (selector or domino):
            raise ValueError(
                "The draft's sample_from_anchor is true and it has a selector or Domino's head; we serve the one only "
                "without the other."
            )
        return cls(
            block_size=_positive(merged, "block_size"),
            mask_token_id=mask_token_id,
            mask_token=mask_token,
            target_layer_ids=_target_layer_ids(merged),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_positive({"num_key_value_heads": num_heads, **config}, "num_key_value_heads"),
            head_dim=_head_dim(config, hidden_size // num_heads),
            intermediate_size=_positive(config, "intermediate_size"),
            attention=_layer_attention(merged, num_layers),
            layout=layout,
            anchor_first=anchor_first,
            head_vocab_size=_head_vocab_size(config),
            dtype=_dtype(config),
            attention_bias=_flag(config, "attention_bias"),
            gemma_norms=_flag(config, "use_gemma_norm"),
            value_scale=_value_scale(dflash),
            attention_sinks=_flag(dflash, "attention_sink_bias", null=False),
            quantization=_quantization(config),
            convolution=read_convolution(config, dflash),
            selector=selector,
            domino=domino,
        )

    @property
    def most_rows(self) -> int:
        """Rows of a request that a step verifies at most, anchor included."""
        return self.block_size + self.anchor_first

    def summary(self, rows: int) -> str:
        """What is in force, as a server says it. rows: of a step, at most."""
        dtype = self.dtype or "no dtype given"
        windows = {f"{one.window} tokens" if one.window else "no window" for one in self.attention}
        causal = [str(place) for place, one in enumerate(self.attention) if one.causal]
        seen = "the rows up to itself" if len(causal) == self.num_layers else "its whole block"
        if 0 < len(causal) < self.num_layers:
            seen += f", in layers {', '.join(causal)} the rows up to itself"
        anchor = "gives a draft, too" if self.anchor_first else "is the anchor"
        head = f"a head of its own over {self.head_vocab_size} ids" if self.head_vocab_size else "the target's head"
        return (
            f"{self.num_layers} layers, {dtype}; blocks of {self.block_size} rows, of which the "
            f"first {anchor}; at most {rows} rows in a step; a row sees {seen}; {' or '.join(sorted(windows))}; "
            f"taps {', '.join(map(str, self.target_layer_ids))}; mask id "
            f"{self.mask_token_id}{f' ({self.mask_token!r})' if self.mask_token else ''}; {head}"
        )

    def check_target(self, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        """Raises ValueError, in one sentence, if this draft does not fit a target of that shape."""
        if hidden_size != self.hidden_size:
            raise ValueError(
                f"The draft's hidden_size is {self.hidden_size} and the target's is {hidden_size}: "
                "they must be equal, because the draft uses the target's embedding and head."
            )
        outside = [layer for layer in self.target_layer_ids if not EMBEDDING <= layer < num_layers]
        if outside:
            raise ValueError(
                f"dflash_config.target_layer_ids has {outside}, but a draft can read only layers 0 to {num_layers - 1} "
                f"of the target's {num_layers}, and {EMBEDDING}, its embedding."
            )
        if self.mask_token_id is None or self.mask_token_id >= vocab_size:
            raise ValueError(
                f"dflash_config.mask_token_id is {self.mask_token_id}; it must be one of the target's {vocab_size} "
                "token ids."
            )
        if self.selector is not None and self.selector.vocab_size < vocab_size:
            raise ValueError(
                f"The draft's vocab_size is {self.selector.vocab_size} and the target's {vocab_size}: the draft's "
                "selector needs a row for each of the target's token ids."
            )
        if self.domino is not None and self.domino.vocab_size != vocab_size:
            raise ValueError(
                f"The draft's vocab_size is {self.domino.vocab_size} and the target's {vocab_size}: for Domino they "
                "must be equal."
            )

    def check_ranks(self, tp_size: int) -> None:
        """Raises ValueError, in one sentence, if the draft cannot be split over `tp_size` tensor-parallel ranks."""
        sizes = {"num_attention_heads": self.num_heads, "intermediate_size": self.intermediate_size}
        if tp_size % self.num_kv_heads:  # else each rank has one KV head, alone or as a copy
            sizes["num_key_value_heads"] = self.num_kv_heads
        for key, size in sizes.items():
            if size % tp_size:
                raise ValueError(f"--tp-size is {tp_size} and the draft's {key} is {size}: --tp-size must divide it.")


def build_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The published formula for the tapped layers of a checkpoint that names none (z-lab/dflash, `dflash/model.py`)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(f"The draft's config has {key}={value!r}; it must be a positive integer.")
    return value


def _head_dim(config: Mapping[str, Any], share: int) -> int:
    """share: of one head in the hidden size."""
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim")
    return QWEN3_HEAD_DIM if config.get("model_type") == "qwen3" else share


def _refuse_special_heads(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        way_out = (
            USE_DSPARK if "dspark" in str(architectures).lower() and config.get("markov_rank") != 0 else USE_BUILTIN
        )
        raise ValueError(
            f"The draft's architectures are {architectures}; this worker serves one of {', '.join(ARCHITECTURES)}: "
            f"{way_out}."
        )
    for key, head in SPECIAL_HEADS.items():
        value = dflash.get(key) or config.get(key)
        if value and (key, value) != ("projector_type", "domino"):
            way_out = USE_DSPARK if key in DSPARK_KEYS or value == "dspark" else USE_BUILTIN
            raise ValueError(f"The draft has {head} ({key}={value!r}), which we do not serve: {way_out}.")
    for keys, level, place in ((NESTED, config, "dflash_config"), (TOP_LEVEL, dflash, "the top level")):
        for key in keys:
            if level.get(key):
                raise ValueError(f"The draft's {key} stands where SGLang ignores it; it must be in {place}.")
    lilicorr = sorted(key for key, value in dflash.items() if key.startswith("lilicorr") and value)
    if lilicorr:
        raise ValueError(f"The draft has LiLiCorr's reranker ({lilicorr[0]}), which we do not serve: {USE_BUILTIN}.")


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name is not None and name not in DTYPES:
        raise ValueError(f"The draft's dtype is {value!r}; it must be one of {', '.join(DTYPES)}, or absent.")
    return name


def _head_vocab_size(config: Mapping[str, Any]) -> int | None:
    """None where the draft's vocabulary is the target's."""
    if config.get("draft_vocab_size") in (None, config.get("vocab_size")):
        return None
    return _positive(config, "draft_vocab_size")


def _flag(config: Mapping[str, Any], key: str, null: bool = True) -> bool:
    """null: whether SGLang takes a null for false."""
    value = config.get(key, False)
    if type(value) is not bool and not (null and value is None):
        raise ValueError(f"The draft's {key} is {value!r}; it must be true, false or absent.")
    return bool(value)


def _value_scale(dflash: Mapping[str, Any]) -> float | None:
    value = dflash.get("attention_value_scale")
    if value is not None and (type(value) not in (int, float) or not 0 < abs(value) < float("inf")):
        raise ValueError(f"dflash_config.attention_value_scale is {value!r}; it must be a finite number other than 0.")
    return None if value is None else float(value)


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    described = config.get("quantization_config")
    if not described:
        return None
    if not isinstance(described, Mapping):
        raise ValueError(f"The draft's quantization_config is {described!r}; it must be an object.")
    if config.get("has_embed_tokens"):
        raise ValueError(
            "The draft is quantised and has an embedding of its own (has_embed_tokens), which we do not serve: "
            f"{USE_BUILTIN}."
        )
    return dict(described)


def _layer_attention(config: Mapping[str, Any], num_layers: int) -> tuple[LayerAttention, ...]:
    full, sliding = "full_attention", "sliding_attention"
    layer_types, slides = config.get("layer_types"), config.get("use_sliding_window", False)
    if layer_types is None:
        # The default of transformers' Qwen3Config, with which SGLang reads a draft's config.
        first = num_layers
        if slides and config.get("sliding_window", True) is not None:
            first = config.get("max_window_layers", 28)
            if type(first) is not int or first < 0:
                raise ValueError(f"The draft's max_window_layers is {first!r}; it must be an integer of 0 or more.")
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
            f"The draft's layer_types has '{sliding}' and its use_sliding_window is {slides!r}; use_sliding_window "
            "must be true, or SGLang drops the window."
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


def _target_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    layer_ids = config.get("target_layer_ids")
    if not isinstance(layer_ids, list) or not layer_ids or any(type(i) is not int for i in layer_ids):
        raise ValueError(f"dflash_config.target_layer_ids is {layer_ids!r}; it must be a list of layer numbers.")
    # Whatever the list says, SGLang captures each layer once, in the model's order.
    if any(second <= first for first, second in pairwise(layer_ids)):
        raise ValueError(f"dflash_config.target_layer_ids is {layer_ids}; the layer numbers must rise.")
    return tuple(layer_ids)

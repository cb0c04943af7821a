"""A target of `mlx_lm` as the MLX engine needs it: loaded as its config says, tapped, with its KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sglang_dflash.core.draft_formats import EMBEDDING

TARGETS = ("llama", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on the length


class Rope:
    """Rotary embedding with the frequencies of transformers, which differ from mlx-lm's reading of some configs."""

    def __init__(self, config: Any) -> None:
        """config: of transformers. Raises ValueError for a kind whose frequencies depend on the length."""
        kind = config.rope_parameters["rope_type"]
        if kind not in ROPE_TYPES:
            raise ValueError(f"The rope_type is {kind!r}; with MLX it must be one of {', '.join(ROPE_TYPES)}.")
        made = Qwen3RotaryEmbedding(config)
        self.wavelengths, self.scale = mx.array(1.0 / made.inv_freq.numpy()), made.attention_scaling  # [D / 2] float32

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        """x: [B, heads, T, D], at positions offset, offset + 1, ..."""
        x = x if self.scale == 1.0 else x * self.scale
        size = x.shape[-1]
        return mx.fast.rope(x, size, traditional=False, base=None, scale=1.0, offset=offset, freqs=self.wavelengths)


def load_target(name: str | Path, dtype: mx.Dtype | None = None) -> tuple[nn.Module, Any]:
    """`mlx_lm.load`, with what mlx-lm 0.32.2 overlooks in configs that transformers 5 writes: the rotary embedding of
    Llama, and the number of experts and scaled frequencies of Qwen3 MoE.

    Args:
        name: a folder, or a name of the hub; also one that mlx-lm has quantised.
        dtype: of the weights; None: as they are stored.

    Returns:
        The model and mlx-lm's tokenizer.

    Raises:
        ValueError: the target is not one of TARGETS, has sliding layers, or something else that mlx-lm overlooks.
    """
    config = AutoConfig.from_pretrained(str(name))
    check_family(config.model_type, getattr(config, "layer_types", None) or [])
    turned = config.rope_parameters.get("partial_rotary_factor") or 1.0
    for key, value, allowed in (("hidden_act", config.hidden_act, "silu"), ("partial_rotary_factor", turned, 1.0)):
        if value != allowed:
            raise ValueError(f"The target's {key} is {value!r}; with MLX it must be {allowed!r}.")
    read = {"rope_theta": config.rope_parameters["rope_theta"], "num_experts": getattr(config, "num_experts", None)}
    model, tokenizer = mlx_lm.load(str(name), model_config=read)
    if config.rope_parameters["rope_type"] != "default":
        rope = Rope(config)
        for layer in model.layers:
            layer.self_attn.rope = rope
    if dtype is not None:
        model.set_dtype(dtype)
        mx.eval(model.parameters())
    return model, tokenizer


def check_family(model_type: str, layer_types: Sequence[str]) -> None:
    if model_type not in TARGETS:
        raise ValueError(
            f"The target's model_type is {model_type!r}; with MLX it must be one of {', '.join(TARGETS)}: the state of "
            "recurrent layers cannot drop a rejected draft."
        )
    others = sorted({kind for kind in layer_types if kind != "full_attention"})
    if others:
        raise ValueError(f"The target has layers of the kind {', '.join(others)}; with MLX all must be full_attention.")


class _Tap:
    """Stands in for a layer of the target and keeps what enters it and what leaves it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self.entered, self.left = x, self.layer(x, *args, **kwargs)
        return self.left


class Target:
    """The target with its KV cache, and what the draft needs of it."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self.model, self.layer_ids, self.cache = model, layer_ids, make_prompt_cache(model)

    def __call__(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Logits [1, T, V] and context features [1, T, taps * H] of ids [1, T], which the cache then holds."""
        layers = self.model.model.layers
        taps = {max(layer, 0): _Tap(layers[max(layer, 0)]) for layer in self.layer_ids}
        self.model.model.layers = [taps.get(place, layer) for place, layer in enumerate(layers)]
        try:
            logits = self.model(ids, cache=self.cache)
        finally:
            self.model.model.layers = layers
        seen = [taps[0].entered if layer == EMBEDDING else taps[layer].left for layer in self.layer_ids]
        return logits, mx.concatenate(seen, axis=-1)

    def prefill(self, prompt: mx.array, step: int) -> tuple[mx.array, mx.array]:
        """Logits of the last token [1, 1, V], which runs alone as in mlx-lm, and features [1, P, taps * H]."""
        features = []
        for start in range(0, len(prompt) - 1, step):
            features.append(self(prompt[None, start : min(start + step, len(prompt) - 1)])[1])
            mx.eval(features[-1], [cache.state for cache in self.cache])
            mx.clear_cache()
        logits, last = self(prompt[None, -1:])
        return logits, mx.concatenate([*features, last], axis=1)

    def embed(self, ids: mx.array) -> mx.array:
        return self.model.model.embed_tokens(ids)

    def head(self, hidden: mx.array) -> mx.array:
        tied = self.model.args.tie_word_embeddings
        return self.model.model.embed_tokens.as_linear(hidden) if tied else self.model.lm_head(hidden)

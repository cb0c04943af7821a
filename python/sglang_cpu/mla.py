"""Latent attention (MLA: DeepSeek-V3, Kimi-K2, GLM-4.7-Flash) on a plain CPU, over our attention backend.

The pool holds one row per token, `kv_lora_rank + qk_rope_head_dim` wide, and the values are the first part of that row:
one KV head, whose keys are wider than its values.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

from sglang_cpu.detect import ATTENTION_BACKEND
from sglang_cpu.hooking import AROUND, hook


def install() -> None:
    """Registers the check of the target. It comes before SGLang's adjustments, which ask for a GPU's capability where
    an indexer selects keys."""
    register_resolution_hook("handle_model_specific_adjustments")(_check_target)


def is_latent(model: Any) -> bool:
    """Whether a target keeps latent rows.

    model: SGLang's `ModelConfig`.
    """
    return bool(model.attention_arch == AttentionArch.MLA)


def absorb_always() -> None:
    """Has SGLang's latent layers read the pool in all modes, with their projections to and from the latent space
    absorbed in queries and outputs.

    For a backend that it does not know, SGLang takes the choice that it makes for Triton's: a prompt without a prefix
    runs as ordinary attention, which rounds otherwise than a chunk or a cached prefix does.
    """
    # Not at the top: SGLang's modules below import what our hooks replace, and must come after them.
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda layer, forward_batch: AttnForwardMethod.MLA)


def _check_target(server_args: Any, previous: Any) -> None:
    model = model_config_of(server_args)
    config = model.hf_text_config
    if is_deepseek_dsa(config):
        raise SystemExit(
            f"The target {', '.join(model.hf_config.architectures)} has an indexer that selects keys (index_topk is "
            f"{config.index_topk}): on the CPU, latent attention is served without one only."
        )
    previous(server_args)


@hook(
    "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu",
    AROUND,
    why="knows DeepSeek's YaRN only, and asserts scaled positions",
    until="SGLang builds plain ones, too",
)
def rotary_of(
    original: Any,
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    *rest: Any,
) -> Any:
    """On a CPU, SGLang knows DeepSeek's YaRN only, and asserts that positions are scaled."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    make = original if rope_scaling is not None else get_rope
    options = rest if rope_scaling is not None else rest[:2]  # without the device
    return make(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, *options)

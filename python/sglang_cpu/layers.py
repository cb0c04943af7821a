"""Runs SGLang's norms, rotary embeddings, linear layers and heads on a plain CPU with the native ops.

On a plain CPU SGLang has only torch implementations of them.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.layers.attention.mamba.mixer2_rms_norm_gated import Mixer2RMSNormGated
from sglang.srt.layers.layernorm import Gemma4RMSNorm, GemmaRMSNorm, RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.platforms import current_platform
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from sglang_cpu import ops

logger = logging.getLogger(__name__)
ROTARY = (RotaryEmbedding, Llama3RotaryEmbedding, YaRNScalingRotaryEmbedding)  # they differ only in their tables


@cache
def _kernels() -> ops.Kernels:
    """The native ops. Each forward asks first whether they take its tensors, as SGLang's layers have any dtype."""
    return ops.choose_kernels(*ops.NATIVE_DTYPES)


def install() -> None:
    """Registers our forwards, and the building of the native ops where they are missing."""
    register_forwards()
    register_resolution_hook("handle_model_specific_adjustments")(_build_ops)


def _build_ops(server_args: Any, previous: Any) -> None:
    """Builds the native ops before the first child exists: only the main process resolves arguments. It is the last
    step before one asks whether they serve (`deterministic`), so many a refusal comes without the wait."""
    previous(server_args)
    if not ops.serves("cpu"):
        ops.native.build(logger.warning)  # also shown with --log-level warning: it explains a minute of silence
        try:
            register_forwards()
        except (ImportError, RuntimeError) as error:  # such as an unknown SGLANG_DFLASH_ISA
            raise SystemExit(f"sglang-dflash could not load its native CPU ops: {error}") from None
    logger.info("SGLang serves on a plain CPU; native ops: %s.", ops.native.described())


def register_forwards() -> None:
    """Registers our forwards for exactly these classes, and our products with torch. Without native ops it does
    nothing, and SGLang's forwards stay."""
    if not ops.serves("cpu"):
        return
    ops.install_linear()
    key = current_platform.get_dispatch_key_name()
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, key)
    BaseFusedOp.register_oot_forward(GemmaRMSNorm, gemma_rms_norm, key)
    BaseFusedOp.register_oot_forward(Gemma4RMSNorm, gemma4_rms_norm, key)
    BaseFusedOp.register_oot_forward(Mixer2RMSNormGated, gated_group_norm, key)
    BaseFusedOp.register_oot_forward(MRotaryEmbedding, rotate_sections, key)
    for layer in ROTARY:
        BaseFusedOp.register_oot_forward(layer, rotate, key)


def rms_norm(
    norm: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    """Computes `RMSNorm.forward_native` with our op; layers with special options keep SGLang's."""
    special = norm.cast_x_before_out_mul or norm.fp32_residual or norm.override_orig_dtype
    special = special or norm.variance_size_override is not None or x.shape[-1] != norm.hidden_size
    if special or not _usual(norm, x, residual, post_residual_addition):
        return norm.forward_native(x, residual, post_residual_addition, quant_linear)
    return _normed(x, residual, norm.weight, norm.variance_epsilon)


def gemma_rms_norm(
    norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, post_residual_addition: torch.Tensor | None = None
) -> Any:
    """Computes `GemmaRMSNorm.forward_native` with our op: an RMS norm with the weight 1 + w, in float32."""
    if not _usual(norm, x, residual, post_residual_addition):
        return norm.forward_native(x, residual, post_residual_addition)
    return _normed(x, residual, norm.weight.float() + 1.0, norm.variance_epsilon)


def _usual(norm: Any, x: torch.Tensor, residual: torch.Tensor | None, addition: torch.Tensor | None) -> bool:
    """Whether our op serves these tensors. In a captured forward it serves none, because inductor fuses the norm."""
    same = residual is None or (residual.dtype == x.dtype and residual.shape == x.shape)
    usual = get_proxy_mode() is None and addition is None and same
    return usual and ops.serves(x.device, x.dtype, norm.weight.dtype)


def _normed(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> Any:
    if residual is None:
        return _kernels().rms_norm(x, weight, eps)
    return _kernels().add_rms_norm(x, residual, weight, eps)


def gemma4_rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes `Gemma4RMSNorm.forward_native` with our op; a norm without scale has a weight of ones."""
    if get_proxy_mode() is not None or not ops.serves(x.device, x.dtype, norm.weight.dtype):
        return norm.forward_native(x)
    weight = norm.weight.float() + norm.scale_shift if norm.scale_shift else norm.weight
    out: torch.Tensor = _kernels().rms_norm(x, weight, norm.eps)
    return out


def gated_group_norm(norm: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Computes `Mixer2RMSNormGated.forward_native` with our op where each rank has whole groups. x, gate: [T, H]."""
    groups, shared = divmod(norm.n_groups, norm.tp_size)
    if shared or not norm.use_rms_norm or not ops.serves(x.device, x.dtype, gate.dtype, norm.weight.dtype):
        return norm.forward_native(x, gate)
    in_groups = (part.unflatten(-1, (groups, -1)) for part in (x, gate, norm.weight))
    out: torch.Tensor = _kernels().gated_rms_norm(*in_groups, norm.variance_epsilon, True, True)
    return out.flatten(1)


def rotate_sections(
    rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, fused_set_kv_buffer_arg: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `MRotaryEmbedding.forward_native` with our op where all sections have the same positions, as in text.

    positions: [N], or [3, N]: in time, height and width.
    """
    text = positions.dim() == 1 or (get_proxy_mode() is None and bool((positions == positions[0]).all()))
    dense = query.stride(-1) == key.stride(-1) == 1 and query.dim() == key.dim() == 2
    taken = ops.serves(query.device, query.dtype, key.dtype, rotary.cos_sin_cache.dtype)
    if get_proxy_mode() is not None or not (text and dense and taken and rotary.is_neox_style):
        return rotary.forward_native(positions, query, key, fused_set_kv_buffer_arg)
    return rotate(rotary, positions if positions.dim() == 1 else positions[0].contiguous(), query, key)


def rotate(
    rotary: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `RotaryEmbedding.forward_native` in place, like SGLang's device kernels; neox (halves paired) only."""
    own_table = hasattr(rotary, "sin_cos_cache")
    dense = query.stride(-1) == key.stride(-1) == 1 and query.dim() == key.dim() == 2
    taken = ops.serves(query.device, query.dtype, key.dtype, rotary.cos_sin_cache.dtype)
    if get_proxy_mode() is not None or own_table or not (rotary.is_neox_style and dense and taken and offsets is None):
        return rotary.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    assert fused_set_kv_buffer_arg is None, "no path of SGLang on the CPU fuses the KV write"
    for x in (query, key):
        heads = x.unflatten(-1, (-1, rotary.head_size))
        _kernels().norm_rope_(heads, None, 0.0, positions.flatten(), rotary.cos_sin_cache)
    return query, key

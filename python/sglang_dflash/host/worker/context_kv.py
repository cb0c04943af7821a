"""Writes the draft's KV of committed tokens from the target's hidden states."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.speculative.dflash_utils import can_dflash_slice_qkv_weight

from sglang_dflash import ops

logger = logging.getLogger(__name__)
LayerKV = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer, each [N, Hkv, D]
ROWS = 2048  # rows of one product; bounds the temporary memory of a long prefill


class ContextKVWriter:
    """Computes the context KV of all draft layers in one product, from their stacked key and value projections.

    Where these cannot be stacked, because they are quantised or rotate in another style, SGLang's own methods compute
    it layer by layer.
    """

    def __init__(self, draft_model: Any) -> None:
        """draft_model: SGLang's `DFlashDraftModel`, weights loaded."""
        self._attentions = [layer.self_attn for layer in draft_model.layers]
        self._model = draft_model
        self._layers = [attention.attn for attention in self._attentions]
        self._stacked = all(_can_be_stacked(attention) for attention in self._attentions)
        first = self._attentions[0]
        self._rotary = first.rotary_emb
        self._eps = first.k_norm.variance_epsilon
        self._value_scale = first.v_scale
        if self._stacked:
            self._kv_weight, self._kv_bias, self._k_norm_weight = self._projections()
            self._kernels = ops.choose_kernels(self._kv_weight.device, self._kv_weight.dtype)
        self._buffers: ops.KVBuffers | None = None

    def bind(self, pool: Any) -> None:
        """Chooses how rows are written to the draft's KV pool.

        One call writes all layers if the pool holds plain rows of the draft's dtype, or on CUDA of FP8 without scales,
        and an op supports them. Otherwise SGLang writes layer by layer: it scales and knows other layouts.
        """
        if not self._stacked:
            method = type(self._attentions[0].qkv_proj.quant_method).__name__
            logger.info("sglang-dflash computes and writes context KV layer by layer (%s).", method)
            return
        k, v = ([_as_held(pool, buffer) for buffer in getattr(pool, name, [])] for name in ("k_buffer", "v_buffer"))
        scales = [scale for layer in self._layers for scale in (layer.k_scale, layer.v_scale)]
        plain = type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and not any(scales)
        fits = plain and ops.fits(k, v) and len(k) == len(self._layers)
        same = fits and k[0].dtype == self._kv_weight.dtype
        if same or (fits and k[0].dtype == ops.FP8 and _has_fp8(k[0])):
            self._buffers = ops.KVBuffers(k, v)
        way = "one call for all layers" if self._buffers else "one write per layer"
        logger.info("sglang-dflash writes context KV with %s.", way)

    def refresh(self) -> None:
        """Copies the draft's weights after they changed. In place, because a forward may still read the tensors."""
        if not self._stacked:
            return
        stacked = (self._kv_weight, self._kv_bias, self._k_norm_weight)
        for held, weight in zip(stacked, self._projections(), strict=True):
            if held is not None and weight is not None:
                held.copy_(weight)

    def _projections(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Of this rank's heads: weight [L, 2, Hkv, D, H], bias [L, 2, Hkv, D] or None; and key norm weight [L, D]."""
        attentions = self._attentions
        first = attentions[0]
        shape = (len(attentions), 2, first.num_kv_heads, first.head_dim)
        weight = torch.stack([a.qkv_proj.weight[a.q_size :] for a in attentions]).view(*shape, -1)
        biases = [a.qkv_proj.bias[a.q_size :] for a in attentions if a.qkv_proj.bias is not None]
        bias = torch.stack(biases).view(shape) if biases else None
        norm = torch.stack([a.k_norm.weight for a in attentions])
        return weight, bias, norm.float() + 1.0 if first.use_gemma_norm else norm

    def write(self, pool: Any, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes every given row, also the rejected rows of a verified block. A rejected row's slot holds no committed
        token, and a later step overwrites it before anything reads it.

        Args:
            pool: the draft's KV pool.
            hidden: [N or more, taps * H]; the target's tapped layers, concatenated.
            positions: [N] int64, absolute.
            slots: [N] int64; ids of the draft's pool.
        """
        count = len(slots)
        for begin in range(0, count, ROWS):
            rows = slice(begin, min(begin + ROWS, count))  # hidden may have more rows
            self._write_rows(pool, hidden[rows], positions[rows], slots[rows])

    def _write_rows(self, pool: Any, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        features = self._model.project_target_hidden(hidden)
        if self._buffers is not None:
            kv = ops.project_context(features, self._kv_weight, self._kv_bias)
            if self._value_scale is not None:
                kv[:, :, 1].mul_(self._value_scale)
            cos_sin = self._rotary.cos_sin_cache
            rows = (kv, self._k_norm_weight, self._eps, positions, cos_sin, slots)
            self._kernels.write_context_kv(*rows, self._buffers)
            return
        location = KVWriteLoc(slots, physical=True)
        by_layer = self._stacked_kv(features, positions) if self._stacked else self._kv_of_the_host(features, positions)
        for layer, (k, v) in zip(self._layers, by_layer, strict=True):
            pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)

    def _stacked_kv(self, features: torch.Tensor, positions: torch.Tensor) -> Iterator[LayerKV]:
        cos_sin = self._rotary.cos_sin_cache
        k, v = ops.context_kv(
            features, self._kv_weight, self._kv_bias, self._k_norm_weight, self._eps, positions, cos_sin
        )
        return zip(k, v if self._value_scale is None else v * self._value_scale, strict=True)

    def _kv_of_the_host(self, features: torch.Tensor, positions: torch.Tensor) -> Iterator[LayerKV]:
        for attention in self._attentions:
            k, v = attention.kv_proj_only(features)  # the values are scaled
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            shape = (-1, attention.num_kv_heads, attention.head_dim)
            yield k.view(shape), v.view(shape)


def _as_held(pool: Any, buffer: torch.Tensor) -> torch.Tensor:
    """A pool's buffer in the dtype of its values: FP8 lies there as bytes."""
    return buffer.view(pool.dtype) if buffer.dtype == torch.uint8 and pool.dtype == ops.FP8 else buffer


def _has_fp8(buffer: torch.Tensor) -> bool:
    """Whether Triton converts to FP8 on this device: from Ada on."""
    return buffer.is_cuda and torch.cuda.get_device_capability(buffer.device) >= (8, 9)


def _can_be_stacked(attention: Any) -> bool:
    rotary = attention.rotary_emb
    dense, _ = can_dflash_slice_qkv_weight(attention.qkv_proj)
    return dense and rotary.is_neox_style and hasattr(rotary, "cos_sin_cache")

"""Writes the draft's KV of committed tokens from the target's hidden states."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from sglang_dflash import ops

logger = logging.getLogger(__name__)
ROWS = 2048  # per product: bounds the temporaries of a long prefill


class ContextKVWriter:
    """Holds the draft layers' key and value projections stacked, so that all layers take one product."""

    def __init__(self, draft_model: Any) -> None:
        """draft_model: SGLang's `DFlashDraftModel`, weights loaded, unquantised."""
        attentions = [layer.self_attn for layer in draft_model.layers]
        first = attentions[0]
        if not first.rotary_emb.is_neox_style or not hasattr(first.rotary_emb, "cos_sin_cache"):
            raise ValueError("The draft's rotary embedding is not of the neox style with a table, which we need.")
        self._model = draft_model
        self._layers = [attention.attn for attention in attentions]
        self._rotary = first.rotary_emb
        self._eps = first.k_norm.variance_epsilon
        self._kv_weight, self._kv_bias, self._k_norm_weight = self._projections()
        self._buffers: ops.KVBuffers | None = None
        self._rows = ops.TORCH_ROWS

    def bind(self, pool: Any) -> None:
        """Chooses how rows reach the draft's KV pool: all layers in one call where it holds plain slots in the draft's
        own dtype and an op takes them; else layer by layer through the host, which quantises and knows other layouts.
        """
        k, v = getattr(pool, "k_buffer", ()), getattr(pool, "v_buffer", ())
        scales = [scale for layer in self._layers for scale in (layer.k_scale, layer.v_scale)]
        plain = type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and not any(scales)
        same = plain and ops.fits(k, v) and k[0].dtype == self._kv_weight.dtype and len(k) == len(self._layers)
        if same and (k[0].is_cuda or ops.serves(k[0].device, k[0].dtype)):
            self._buffers = ops.KVBuffers(k, v)
            self._rows = ops.choose_rows(k[0].device, k[0].dtype)
        way = "one call for all layers" if self._buffers else "a write per layer"
        logger.info("sglang-dflash writes context KV by %s.", way)

    def refresh(self) -> None:
        """Takes up the draft's weights after they changed, in place: a forward may still be reading."""
        stacked = (self._kv_weight, self._kv_bias, self._k_norm_weight)
        for held, weight in zip(stacked, self._projections(), strict=True):
            if held is not None:
                held.copy_(weight)

    def _projections(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """[L, 2, Hkv, D, H] and [L, 2, Hkv, D] of this rank's heads, and [L, D]."""
        attentions = [layer.self_attn for layer in self._model.layers]
        first = attentions[0]
        shape = (len(attentions), 2, first.num_kv_heads, first.head_dim)
        weight = torch.stack([a.qkv_proj.weight[a.q_size :] for a in attentions]).view(*shape, -1)
        biases = [a.qkv_proj.bias[a.q_size :] for a in attentions if a.qkv_proj.bias is not None]
        bias = torch.stack(biases).view(shape) if biases else None
        return weight, bias, torch.stack([a.k_norm.weight for a in attentions])

    def write(self, pool: Any, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes every given row. A verified row beyond the committed ones may be among them: its slot holds no
        committed token, and nothing reads it before a later step writes it again.

        Args:
            pool: the draft's KV pool.
            hidden: [N, taps * H]; the target's tapped layers, concatenated.
            positions: [N] int64, absolute.
            slots: [N] int64, in the draft pool's ids.
        """
        count = len(slots)
        for begin in range(0, count, ROWS):
            rows = slice(begin, min(begin + ROWS, count))  # hidden may have more
            self._write_rows(pool, hidden[rows], positions[rows], slots[rows])

    def _write_rows(self, pool: Any, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        features = self._model.project_target_hidden(hidden)
        cos_sin = self._rotary.cos_sin_cache
        if self._buffers is not None:
            kv = ops.project_context(features, self._kv_weight, self._kv_bias)
            self._rows.write_context_kv(kv, self._k_norm_weight, self._eps, positions, cos_sin, slots, self._buffers)
            return
        k, v = ops.context_kv(
            features,
            self._kv_weight,
            self._kv_bias,
            self._k_norm_weight,
            self._eps,
            positions,
            cos_sin,
        )
        location = KVWriteLoc(slots, physical=True)
        for layer, layer_k, layer_v in zip(self._layers, k, v, strict=True):
            pool.set_kv_buffer(layer, location, layer_k, layer_v, layer.k_scale, layer.v_scale)

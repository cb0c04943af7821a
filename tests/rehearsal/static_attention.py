"""Attention for rehearsed graphs: its inputs lie at fixed places, and Python decides nothing by their values."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_spec

from sglang_cpu.attention import CpuAttentionBackend, _view_of


class StaticAttentionBackend(CpuAttentionBackend):
    """Verification inside a graph, in plain torch over the whole width of the slot table; the rest as on any CPU.

    Like the backends of a device, it asks for no lengths on the CPU, and copies slots and lengths into buffers of its
    own before each replay.
    """

    needs_cpu_seq_lens = False
    supports_ragged_verify_graph = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._batch = 0  # requests of the graph at hand; 0 outside graphs
        self._masked = (get_spec().speculative_eagle_topk or 0) > 1  # rows see what a mask says; as fa3 decides it
        self._packed = 0  # rows of the graph at hand, if they are of requests of different lengths

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        table = self.req_to_token_pool.req_to_token
        self._slots = torch.zeros(max_bs, table.shape[1], dtype=torch.int64)
        self._prefix_lens = torch.zeros(max_bs, dtype=torch.int64)
        rows = max_num_tokens // max_bs
        self._mask = torch.ones(max_bs * rows * (table.shape[1] + rows), dtype=torch.uint8)
        self._mask_starts = torch.zeros(max_bs, dtype=torch.int64)
        self._row_slots = torch.zeros(max_num_tokens, table.shape[1], dtype=torch.int64)
        self._rows_before = torch.zeros(max_num_tokens, dtype=torch.int64)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.PRE_REPLAY

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._batch, self._packed = 0, 0
        assert getattr(forward_batch.spec_info, "custom_mask", None) is None, "a mask outside graphs"
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        assert forward_batch.forward_mode.is_target_verify(), forward_batch.forward_mode
        self._batch = forward_batch.batch_size
        rows = forward_batch.req_pool_indices
        self._slots[: self._batch].copy_(self.req_to_token_pool.req_to_token[rows])
        self._prefix_lens[: self._batch].copy_(forward_batch.seq_lens)
        layout = forward_batch.spec_info.ragged_verify_layout
        self._packed = 0 if layout is None else layout.graph_num_tokens
        if layout is not None:
            self._lay_out_packed(layout.padded_to_bucket(padded_bs=self._batch))
        mask, rows = forward_batch.spec_info.custom_mask, forward_batch.spec_info.draft_token_num
        assert in_capture or self._masked == (mask is not None)
        if mask is not None:
            self._mask[: len(mask)] = mask
            cells = rows * (forward_batch.seq_lens + rows)
            self._mask_starts[: self._batch].copy_(cells.cumsum(0) - cells)

    def _lay_out_packed(self, layout: Any) -> None:
        """Each row becomes a request of one row, behind its prefix and the rows before it. layout: padded."""
        lens = layout.verify_lens.long()
        requests = torch.arange(len(lens)).repeat_interleave(lens)
        assert len(requests) == self._packed, (lens, self._packed)
        within = torch.arange(self._packed) - layout.qo_indptr_device.long()[requests]
        self._row_slots[: self._packed].copy_(self._slots[requests])
        self._rows_before[: self._packed].copy_(self._prefix_lens[requests] + within)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not self._batch:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        scaling, causal, window = _view_of(layer)
        assert window is None and not any(value is not None for value in kwargs.values()), (window, list(kwargs))
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        slots, prefix_lens = self._slots[: self._batch], self._prefix_lens[: self._batch]
        if self._packed:
            slots, prefix_lens = self._row_slots[: self._packed], self._rows_before[: self._packed]
        q = q.view(len(slots), -1, layer.tp_q_head_num, layer.qk_head_dim)
        seen = seen_in_order(q.shape[1], slots.shape[1], prefix_lens, causal)
        if self._masked:
            seen = seen_by_mask(q.shape[1], slots.shape[1], prefix_lens, self._mask, self._mask_starts[: self._batch])
        return attend(q, keys, values, slots, seen, scaling).flatten(0, 1).flatten(1)


def seen_in_order(rows: int, columns: int, prefix_lens: torch.Tensor, causal: bool) -> torch.Tensor:
    """[B, rows, columns] bool: the prefix and the rows, or those before a row.

    Args:
        prefix_lens: [B] int64.
        causal: whether a row does not see the rows behind it.
    """
    last = prefix_lens[:, None] + (torch.arange(rows) if causal else torch.full((rows,), rows - 1))  # [B, rows]
    return torch.arange(columns) <= last[..., None]


def seen_by_mask(
    rows: int, columns: int, prefix_lens: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """[B, rows, columns] bool, from a flat mask in SGLang's form, in which request b begins at `starts[b]`."""
    keys = (prefix_lens + rows)[:, None, None]
    column = torch.arange(columns)
    places = starts[:, None, None] + torch.arange(rows)[:, None] * keys + column
    return mask[places.clamp(max=len(mask) - 1)].bool() & (column < keys)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attention of W rows of each request to its prefix and to those rows.

    Args:
        q: [B, W, Hq, D].
        keys, values: [S, Hkv, D]; a model's pool.
        slots: [B, C] int64; slot of each position. Entries behind a request's last row may be anything.
        seen: [B, W, C] bool.

    Returns:
        [B, W, Hq, D].
    """
    batch, width, heads, dim = q.shape
    q = q.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G * W, D]; G queries a key
    k, v = (pool.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2) for pool in (keys, values))
    scores = (q @ k.transpose(2, 3) * scaling).unflatten(2, (-1, width))  # [B, Hkv, G, W, C]
    weights = scores.masked_fill_(~seen[:, None, None], float("-inf")).softmax(-1).flatten(2, 3)
    return (weights @ v).unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).reshape(batch, width, heads, dim)

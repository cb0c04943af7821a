"""SGLang's attention backend on a plain CPU: turns SGLang's batch into what an `ops.Attention` takes.

The input of a verification may have `lens` ([B] int32: rows of each request; without, all have `draft_token_num`) and,
for trees, `seen` ([B, N, N] bool: the rows of its request that each row sees; without, those before it).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_exec

from sglang_cpu import mla, ops


class CpuAttentionBackend(AttentionBackend):
    """Decode, target-verify and extend over the paged, radix-shared KV pool."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if model_runner.model_config.is_encoder_decoder:
            raise ValueError(
                "The CPU attention backend serves decoder-only targets; "
                f"{model_runner.model_config.hf_config.architectures} uses cross attention."
            )
        if model_runner.use_mla_backend:
            mla.absorb_always()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        kernels = ops.choose_kernels(model_runner.dtype, self.token_to_kv_pool.dtype)
        # `deterministic` has refused what the native attention does not take.
        assert kernels.native or not get_exec().deterministic.enable_deterministic_inference, kernels
        self._attention = kernels.attention
        plain = all(_holds_plain_rows(pool, model_runner.dtype) for pool in _inner_pools(self.token_to_kv_pool))
        self._write_and_attend = self._attention.write_and_attend if plain else None
        self._views: dict[RadixAttention, tuple[float, bool, int | None]] = {}
        # Layers with a window may have a smaller pool of their own: the same tokens have other slots in it.
        windows = self.token_to_kv_pool if type(self.token_to_kv_pool) is SWAKVPool else None
        self._in_window_pool = () if windows is None else {i for i, (_, own) in windows.layers_mapping.items() if own}
        self._rows: Any = None  # layout of the last prepared forward
        self._window_rows: Any = None  # the same over the windows' pool
        self._window_slots: torch.Tensor | None = None  # [T] int64; where the forward's rows are written there

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """SGLang's `seq_lens` include the new token in a decode, but do not include the block in a verify."""
        table, requests = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        self._rows = self._lay_out(table, requests, forward_batch)
        if self._in_window_pool:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            self._window_slots = translate(forward_batch.out_cache_loc)
            # Tokens behind the window have slot 0 there. No row sees them.
            table = translate(table[requests.long(), : _longest(forward_batch)].long()).int()
            self._window_rows = self._lay_out(table, torch.arange(len(requests)), forward_batch)

    def _lay_out(self, table: torch.Tensor, requests: torch.Tensor, forward_batch: ForwardBatch) -> ops.PagedTable:
        mode, seq_lens = forward_batch.forward_mode, forward_batch.seq_lens
        if mode.is_target_verify():
            seen = getattr(forward_batch.spec_info, "seen", None)
            if seen is not None:
                return ops.PagedTable.uniform(*ops.rows_as_requests(table, requests, seq_lens, seen), 1)
            lens = lens_of(forward_batch)
            if lens is not None:
                return ops.PagedTable.gather(table, requests, seq_lens.tolist(), lens.tolist())
            width = forward_batch.spec_info.draft_token_num
            return ops.PagedTable.uniform(table, requests, seq_lens, width)
        if mode.is_decode_or_idle():
            return ops.PagedTable.uniform(table, requests, seq_lens - 1, 1)
        assert mode.is_extend(), f"forward mode {mode} on the CPU"
        prefix_lens, row_lens = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        return ops.PagedTable.gather(table, requests, list(prefix_lens), list(row_lens))

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """
        Args:
            q: [T, Hq * D] or [T, Hq, D].
            k, v: [T, Hkv * D and Dv] or [T, Hkv, D and Dv]; None for a layer that reads the KV of another.
            sinks: [Hq] or None; see `reference.attention_rows`.
            kwargs: unsupported features, such as masks.

        Returns:
            [T, Hq * Dv].
        """
        if kwargs:
            _refuse([name for name, value in kwargs.items() if value is not None])
        view = self._views.get(layer)
        if view is None:
            view = self._views[layer] = _view_of(layer)
        own = layer.layer_id in self._in_window_pool
        rows = self._window_rows if own else self._rows
        options = {} if sinks is None else {"sinks": sinks}
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            if self._write_and_attend is not None and k.dtype == v.dtype == pool.dtype:
                slots = self._window_slots if own else forward_batch.out_cache_loc
                buffers = pool.get_kv_buffer(layer.layer_id)
                return self._write_and_attend(q, k, v, slots, *buffers, rows, *view, **options)
            location = KVWriteLoc.for_batch(forward_batch, swa_loc=self._window_slots)
            pool.set_kv_buffer(layer, location, k, v)
        # After the write, because a pool may hand out a copy.
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self._attention.attend(q, *buffers, rows, *view, **options)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return False


def lens_of(batch: Any) -> torch.Tensor | None:
    """[B] int32: rows of each request of a verification; None if they have equally many."""
    return getattr(batch.spec_info, "lens", None)


def _refuse(unsupported: list[str]) -> None:
    if unsupported:
        raise NotImplementedError(f"The CPU attention backend does not support {', '.join(unsupported)}.")


def _view_of(layer: RadixAttention) -> tuple[float, bool, int | None]:
    """A layer's scaling, causal, and window_left (None: no window)."""
    if layer.logit_cap:
        _refuse(["logit cap"])
    window = layer.sliding_window_size
    causal = layer.attn_type != AttentionType.ENCODER_ONLY
    return layer.scaling, causal, window if window is not None and window >= 0 else None


def _inner_pools(pool: Any) -> list[Any]:
    """The pools in which the layers' keys and values are. A hybrid pool numbers its layers by itself and keeps ordinary
    pools inside: one beside layers with recurrent state, two where layers with a window have their own."""
    if type(pool) is HybridLinearKVPool:
        return [pool.full_kv_pool]
    return [pool.full_kv_pool, pool.swa_kv_pool] if type(pool) is SWAKVPool else [pool]


def _longest(forward_batch: ForwardBatch) -> int:
    """The largest number of tokens that a request has after this forward."""
    rows = forward_batch.spec_info.draft_token_num if forward_batch.forward_mode.is_target_verify() else 0
    return max(forward_batch.seq_lens.tolist(), default=0) + rows


def _holds_plain_rows(pool: Any, dtype: torch.dtype) -> bool:
    """Whether a write to the pool only copies rows to the slots of the given ids. Other pools quantise, translate ids
    or have other layouts; those need SGLang's `set_kv_buffer`."""
    plain = type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd"
    plain = plain and not pool.is_quantized_kv_cache and not pool.requires_physical_write_loc
    return plain and pool.dtype == pool.store_dtype == dtype

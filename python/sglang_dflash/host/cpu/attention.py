"""SGLang's attention backend on a plain CPU: turns the host's batch into what an `ops.Attention` takes."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_exec

from sglang_dflash import ops


class CpuAttentionBackend(AttentionBackend):
    """Decode, target-verify and extend over the paged, radix-shared KV pool."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if model_runner.use_mla_backend or model_runner.model_config.is_encoder_decoder:
            raise ValueError(
                "The CPU attention backend serves decoder-only targets with ordinary keys and values; "
                f"{model_runner.model_config.hf_config.architectures} uses MLA or cross attention."
            )
        if isinstance(model_runner.token_to_kv_pool, SWAKVPool):
            raise ValueError(
                "The CPU attention backend reads one KV pool; start the server with --disable-hybrid-swa-memory."
            )
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._attention = ops.choose_attention("cpu", model_runner.dtype, self.token_to_kv_pool.dtype)
        if get_exec().deterministic.enable_deterministic_inference:
            self._attention = ops.INVARIANT_ATTENTION
            head_dims = (model_runner.model_config.head_dim, model_runner.model_config.v_head_dim)
            if len(set(head_dims)) > 1:
                raise ValueError(
                    f"--enable-deterministic-inference on the CPU needs keys and values of one size, not {head_dims}."
                )
        self._rows: Any = None  # of the forward that was prepared last

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        prefix_lens, row_lens = _row_layout(forward_batch)
        self._rows = self._attention.lay_out(
            self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, prefix_lens, row_lens
        )

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
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[T, Hq * D] in, [T, Hq * Dv] out. Keywords name features that we do not have: sinks, masks."""
        unsupported = [name for name, value in kwargs.items() if value is not None]
        if unsupported or layer.logit_cap:
            raise NotImplementedError(f"CPU attention has no {unsupported or 'logit cap'}.")
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        window = layer.sliding_window_size
        out = self._attention.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self._rows,
            scaling=layer.scaling,
            causal=layer.attn_type != AttentionType.ENCODER_ONLY,
            window_left=window if window is not None and window >= 0 else None,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def support_triton(self) -> bool:
        return False


def _row_layout(forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Per request: the tokens before its first row, and its rows.

    The host counts differently per mode: a decode's `seq_lens` include the new token, a verify's do not
    include the block.
    """
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        prefix_lens = forward_batch.seq_lens.tolist()
        return prefix_lens, [forward_batch.spec_info.draft_token_num] * len(prefix_lens)
    if mode.is_decode_or_idle():
        return (forward_batch.seq_lens - 1).tolist(), [1] * len(forward_batch.seq_lens)
    assert mode.is_extend(), f"forward mode {mode} on the CPU"
    return list(forward_batch.extend_prefix_lens_cpu), list(forward_batch.extend_seq_lens_cpu)

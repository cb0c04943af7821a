"""Gated delta nets over some rows of each block: SGLang 0.5.23 convolves whole blocks alone."""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
from sglang.srt.layers.attention.linear.kda_backend import ragged_verify_dense_scatter_indices
from sglang.srt.layers.attention.linear.utils import select_verify_intermediate_state_indices

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.worker.protocols import ForwardBatch


def allow_graphs(attn_backend: Any) -> None:
    """Lets graphs of packed rows replay over this backend of a target, where a part of it is of gated delta nets."""
    linear = getattr(attn_backend, "linear_attn_backend", None)
    if linear is not None:
        linear.supports_ragged_verify_graph = True


@hook(
    "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
    AROUND,
    why="the rows of a verification are read as [requests, rows], equally many for each",
    until="SGLang convolves packed rows here as it does for Kimi delta attention",
)
def verify_packed(
    original: Any,
    backend: Any,
    layer: Any,
    forward_batch: ForwardBatch,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **rest: Any,
) -> torch.Tensor:
    """A layer's outputs over the rows of a batch, [1, T, value heads, D].

    The convolution runs over whole blocks, zeros behind a request's rows: over as many as the graph may have requests.
    The recurrence runs over the rows alone. Both keep the state after each row in SGLang's scratch memory, which the
    commit reads up to the last accepted row. Rows that only fill a graph get any values.

    Args:
        mixed_qkv: [T, queries, keys and values of all heads].
        a, b: [T, value heads]; the gates.
    """
    if not forward_batch.forward_mode.is_target_verify() or forward_batch.spec_info.ragged_verify_layout is None:
        return original(backend, layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **rest)
    starts, slots = backend.forward_metadata.query_start_loc, backend.forward_metadata.mamba_cache_indices
    requests, width = len(starts) - 1, forward_batch.spec_info.draft_token_num
    state = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    scratch = select_verify_intermediate_state_indices(
        backend.verify_intermediate_state_indices,
        forward_batch.req_pool_indices,
        slots[:requests] >= 0,
        backend.req_to_token_pool.size,
    )
    # One place more: of the rows that only fill the graph, behind the last request's.
    places = ragged_verify_dense_scatter_indices(query_start_loc=starts, seq_len=len(mixed_qkv), draft_token_num=width)
    blocks = mixed_qkv.new_zeros(requests * width + 1, mixed_qkv.shape[-1]).index_copy_(0, places, mixed_qkv)
    convolved = causal_conv1d_update(
        blocks[:-1].view(requests, width, -1).transpose(1, 2),
        state.conv[0],
        layer.conv_weights,
        layer.bias,
        layer.activation,
        conv_state_indices=slots[:requests],
        intermediate_conv_window=state.intermediate_conv_window[0],
        intermediate_state_indices=scratch[:requests],
    )
    rows = convolved.transpose(1, 2).reshape(requests * width, -1)[places.clamp(max=requests * width - 1)]
    query, key, value = rows.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    outputs: torch.Tensor = backend.kernel_dispatcher.target_verify(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query.unflatten(-1, (-1, layer.head_q_dim))[None],
        k=key.unflatten(-1, (-1, layer.head_k_dim))[None],
        v=value.unflatten(-1, (-1, layer.head_v_dim))[None],
        a=a,
        b=b,
        ssm_states=state.temporal,
        cache_indices=slots,
        query_start_loc=starts,
        intermediate_states_buffer=state.intermediate_ssm,
        intermediate_state_indices=scratch,
        cache_steps=width,
        retrieve_parent_token=None,
    )
    return outputs

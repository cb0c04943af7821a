"""SGLang's hybrid attention backend on a plain CPU: layers with recurrent state beside layers with keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, hybrid_kda_config, mamba2_config, mambaish_config
from sglang.srt.environ import envs
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    Mamba2AttnBackend,
    MambaAttnBackendBase,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_exec, get_server_args

from sglang_cpu import ops, state_ring
from sglang_cpu.attention import lens_of
from sglang_cpu.hooking import AROUND, hook
from sglang_cpu.ops import StateRows
from sglang_cpu.shims import Unpinned

KIMI_LINEAR = "KimiLinearForCausalLM"  # Kimi delta attention with unbounded decays; other models bound them
NEMOTRON_H = "NemotronHForCausalLM"  # the one class with Mamba-2 layers that a test has run


@hook(
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
    AROUND,
    why="its recurrent backends launch Triton; ours serve the gated delta rule, in Kimi-Linear with a decay "
    "for each key dimension, and Mamba-2 in Nemotron-H",
    until="SGLang asks its platform here",
)
def wrap_backend(original: Any, runner: Any, full_attention: Any) -> Any:
    """SGLang's recurrent backends launch Triton kernels; ours calls our ops."""
    config = mambaish_config(runner.model_config)
    if config is None:
        return original(runner, full_attention)
    reason = refusal(runner.model_config)
    if reason is not None:
        raise ValueError(reason)
    backend = CpuGatedDeltaBackend if mamba2_config(runner.model_config) is None else CpuMamba2Backend
    return CpuHybridBackend(full_attention, backend(runner), config.full_attention_layer_ids)


def refusal(target: Any) -> str | None:
    """Why the recurrent state of a target has no CPU implementation; None if it has one.

    target: SGLang's `ModelConfig`.
    """
    names = target.hf_config.architectures
    if hybrid_gdn_config(target) is not None or KIMI_LINEAR in names or NEMOTRON_H in names:
        return None
    return (
        f"the target {', '.join(names)} keeps a recurrent state that has no CPU implementation; on a CPU, the gated "
        "delta rule (Qwen3.5, Qwen3.6, Qwen3-Next, Kimi-Linear) and the Mamba-2 layers of Nemotron-H are served."
    )


class CpuStateBackend(MambaAttnBackendBase):
    """The rows of decode, verification and extend over SGLang's pools of states, for layers of either kind."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        cache = model_runner.req_to_token_pool.mamba_pool.mamba_cache
        self._kernels = ops.choose_kernels(model_runner.dtype, cache.conv[0].dtype, cache.temporal.dtype)
        self._rows: StateRows
        self._ring_rows: torch.Tensor
        self._tracked: tuple[torch.Tensor, torch.Tensor] | None = None  # slots to copy after a decode: from, to

    @property
    def state_slots(self) -> torch.Tensor:
        """[B] int64; the slots of the requests of the last forward."""
        return self._rows.slots

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode, pool = forward_batch.forward_mode, self.req_to_token_pool
        self._ring_rows = forward_batch.req_pool_indices.long()
        slots = pool.get_mamba_indices(self._ring_rows).long()
        batch = len(slots)
        old = torch.zeros(batch, dtype=torch.bool)
        self._tracked = None
        if mode.is_target_verify():
            lens = lens_of(forward_batch)
            starts = torch.arange(batch + 1) * forward_batch.spec_info.draft_token_num
            starts = starts if lens is None else torch.cat((lens.new_zeros(1), lens.cumsum(0))).long()
            self._rows = StateRows(slots, starts, old, scratch=torch.arange(batch))
        elif mode.is_decode_or_idle():
            self._rows = StateRows(slots, torch.arange(batch + 1), old)
            if forward_batch.mamba_track_mask is not None:
                mask = forward_batch.mamba_track_mask
                self._tracked = slots[mask], forward_batch.mamba_track_indices[mask].long()
        else:
            assert mode.is_extend(), f"forward mode {mode} on the CPU"
            self._rows = self._extend_rows(forward_batch, slots)

    def _extend_rows(self, forward_batch: ForwardBatch, slots: torch.Tensor) -> StateRows:
        prefix_lens = torch.tensor(forward_batch.extend_prefix_lens_cpu)
        starts = torch.tensor([0, *forward_batch.extend_seq_lens_cpu]).cumsum(0)
        lens, mask = forward_batch.mamba_track_aligned_lens(), forward_batch.mamba_track_mask
        if lens is None or not bool(mask.any()):
            return StateRows(slots, starts, prefix_lens == 0)
        return StateRows(
            slots,
            starts,
            prefix_lens == 0,
            snapshot_rows=torch.where(mask, lens.long(), -1),
            snapshot_slots=forward_batch.mamba_track_indices.long(),
        )

    def _states_of(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The layer's pools, of inputs of the convolution and of states; then the scratch of both, or None."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)
        if self._rows.scratch is None:
            return cache.conv[0], cache.temporal, None, None
        return cache.conv[0], cache.temporal, cache.intermediate_conv_window[0], cache.intermediate_ssm

    def _keep_snapshots(self, *pools: torch.Tensor) -> None:
        """Copies the states that the prefix cache keeps after a decode."""
        if self._tracked is not None:
            source, target = self._tracked
            for pool in pools:
                pool[target] = pool[source]


class CpuGatedDeltaBackend(CpuStateBackend):
    """Layers of the gated delta rule. In Kimi delta attention each key dimension has a decay of its own, and the pools
    hold the inputs of convolutions channels last."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._kimi = hybrid_kda_config(model_runner.model_config) is not None

    def _delta_rule(
        self,
        qkv: torch.Tensor,
        gates: tuple[torch.Tensor, torch.Tensor],
        layer: Any,
        states: torch.Tensor,
        scratch: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H, V]. A verification without scratch for states writes the layer's ring."""
        pool = self.req_to_token_pool
        if self._rows.scratch is None or scratch is not None:
            return self._kernels.delta_rule(qkv, *gates, layer.num_k_heads, states, self._rows, scratch)
        ring = state_ring.ring_of(pool.mamba_pool, pool.mamba2_layer_cache(layer.layer_id))
        return state_ring.verify(qkv, *gates, layer.num_k_heads, states, self._rows, ring, self._ring_rows)

    def forward_extend(
        self,
        *,
        layer: Any,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        linear_attn_output: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """mixed_qkv: [T, C] before the convolution; a, b: [T, H]; in Kimi's layers a: T * H * K elements and b: T * H,
        of any shape. Returns [1, T, H, V]."""
        inputs, states, windows, scratch = self._states_of(layer.layer_id)
        if self._kimi:
            a = a.reshape(len(mixed_qkv), layer.num_v_heads, layer.head_k_dim)
            b = b.reshape(len(mixed_qkv), layer.num_v_heads)
            inputs, windows = inputs.mT, None if windows is None else windows.mT
        qkv = self._kernels.causal_conv(mixed_qkv, layer.conv_weights, layer.bias, inputs, self._rows, windows)
        gates = self._kernels.delta_gates(a, b, layer.A_log, layer.dt_bias)
        out = self._delta_rule(qkv, gates, layer, states, scratch)
        self._keep_snapshots(inputs, states)
        if linear_attn_output is None:
            return out[None]
        return linear_attn_output.copy_(out[None])

    forward_decode = forward_extend


class CpuMamba2Backend(CpuStateBackend, Mamba2AttnBackend):
    """Layers of Mamba-2. Their model calls `forward` with the whole layer, in every mode."""

    def forward(
        self,
        mixer: Any,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: ForwardBatch,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:
        """What `MambaMixer2.forward` computes, with our ops.

        Args:
            mixer: SGLang's `MambaMixer2`.
            hidden_states: [T, H].
            output: a buffer of accelerators' graphs, mup_vector: of Falcon; both None.
            use_triton_causal_conv: ignored.
        """
        assert output is None and mup_vector is None and mixer.activation == "silu", mixer.activation
        inputs, states, windows, scratch = self._states_of(layer_id)
        ranks = mixer.tp_size
        projected, _ = mixer.in_proj(hidden_states)
        widths = [size // ranks for size in (mixer.intermediate_size, mixer.conv_dim, mixer.num_heads)]
        gate, xbc, dt = projected.split(widths, dim=-1)
        xbc = self._kernels.causal_conv(xbc, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, inputs, self._rows, windows)
        layer = mixer.A, mixer.dt_bias, mixer.D, mixer.n_groups // ranks
        out = self._kernels.selective_scan(xbc, dt, *layer, states, self._rows, scratch)
        self._keep_snapshots(inputs, states)
        out, _ = mixer.out_proj(mixer.norm(out.flatten(1), gate))
        return out


class CpuHybridBackend(HybridLinearAttnBackend):
    """SGLang's, but the commit of verified states runs on a CPU, too."""

    def update_mamba_state_after_mtp_verify(
        self,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor | None,
        mamba_steps_to_track: torch.Tensor | None,
        model: Any,
        req_pool_indices: torch.Tensor | None = None,
    ) -> None:
        """Moves, for each request of the last verification, the state after its last accepted row into the pool.

        Args:
            last_correct_step_indices: [B]; the last accepted row.
            mamba_track_indices, mamba_steps_to_track: [B] or None; slot and row of a snapshot for the prefix cache. A
                row of -1: none.
        """
        pool = self.req_to_token_pool
        caches = pool.get_speculative_mamba2_params_all_layers()
        slots = self.linear_attn_backend.state_slots[: len(last_correct_step_indices)]
        moves = [(slots, last_correct_step_indices)]
        if mamba_track_indices is not None and mamba_steps_to_track is not None:
            moves.append((mamba_track_indices, mamba_steps_to_track))
        pairs = [(caches.temporal, caches.intermediate_ssm)]
        pairs += zip(caches.conv, caches.intermediate_conv_window, strict=True)
        for target, steps in moves:
            requests = (steps >= 0).nonzero()[:, 0]
            for states, scratch in pairs:  # [layers, slots, ...] and [layers, places, rows, ...]
                states[:, target[requests].long()] = scratch[:, requests, steps[requests].long()]


@hook(
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
    AROUND,
    why="pins a mask whatever the platform says",
    until="SGLang asks its platform here",
)
def prepare_decode_unpinned(original: Any, batch: Any) -> None:
    """With snapshots of states for the prefix cache, SGLang pins a mask without asking the platform."""
    if not get_exec().mamba.enable_mamba_extra_buffer:
        original(batch)
        return
    with Unpinned():
        original(batch)


@hook(
    "sglang.srt.configs.mamba_utils.mamba2_state_dtype",
    AROUND,
    why="keeps inputs of convolutions in bfloat16 under a float32 model",
    until="SGLang follows the model",
)
def keep_inputs_in_model_dtype(original: Any, config: Any = None) -> Any:
    """SGLang keeps the last inputs of convolutions in bfloat16, whatever the model computes in: in float32, a cached
    prefix would change an answer."""
    dtypes = original(config)
    if envs.SGLANG_MAMBA_CONV_DTYPE.is_set():
        return dtypes
    return replace(dtypes, conv=model_config_of(get_server_args()).dtype)

"""Recurrent states committed by our worker over SGLang's pools, on a CPU: plain ones, or rings of updates.

Real are the pools, their cursors, SGLang's helper of the commit and our call of it. A model is gated delta nets alone,
whose inputs are drawn. Requests come and go; steps have any width, and commit any of their rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs import Qwen3NextConfig
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import spec_utils

from sglang_cpu import ops, state_ring
from sglang_cpu.ops import StateRows
from sglang_dflash.host.worker.recurrent_state import RecurrentState

BLOCK, REQUESTS, LAYERS, KEY_HEADS, HEADS, DIM, TAPS, GRID = 8, 4, 2, 2, 4, 32, 4, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
CONFIG = Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"])
Verify = Callable[["Arm", int, torch.Tensor, tuple[torch.Tensor, torch.Tensor], StateRows, torch.Tensor], torch.Tensor]


def layers_of(seed: int) -> list[SimpleNamespace]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        SimpleNamespace(
            layer_id=number,
            conv_weights=drawn(CHANNELS, TAPS),
            A_log=drawn(HEADS),
            dt_bias=drawn(HEADS),
            num_k_heads=KEY_HEADS,
            num_v_heads=HEADS,
            head_k_dim=DIM,
            head_v_dim=DIM,
        )
        for number in range(LAYERS)
    ]


@dataclass(frozen=True, slots=True)
class Step:
    """A verification. `lens`: [B] rows of each request; `inputs`: [layers, T, CHANNELS + 2 * HEADS]; `commit_lens`:
    [B] int32."""

    requests: torch.Tensor
    lens: torch.Tensor
    inputs: torch.Tensor
    commit_lens: torch.Tensor


class Arm:
    """A server's pools and commits.

    Args:
        length: places of a ring; None: states of all rows are kept.
        verify: a layer's gated delta rule in a verification.
        dtype: of activations.
    """

    def __init__(self, length: int | None, verify: Verify, dtype: torch.dtype, seed: int = 0) -> None:
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=HEADS * DIM,
            n_groups=KEY_HEADS,
            num_heads=HEADS,
            head_dim=DIM,
            state_size=DIM,
            conv_kernel=TAPS,
        )
        dtypes = Mamba2StateDType(conv=dtype, temporal=torch.float32)
        self.cache_params = Mamba2CacheParams(shape=shape, dtype=dtypes, layers=list(range(LAYERS)))
        self.pool = HybridReqToTokenPool(
            size=REQUESTS,
            mamba_size=5 * REQUESTS,
            mamba_spec_state_size=REQUESTS,
            max_context_len=64,
            device="cpu",
            enable_memory_saver=False,
            cache_params=self.cache_params,
            mamba_layer_ids=list(range(LAYERS)),
            enable_mamba_extra_buffer=True,
            speculative_num_draft_tokens=BLOCK,
            speculative_eagle_topk=1,
            linear_replayssm_cache_len=length or 16,
            enable_linear_replayssm_spec=length is not None,
        )
        self.layers, self.verify, self.dtype = layers_of(seed), verify, dtype
        self.kernels = ops.choose_kernels(dtype)
        runner = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=CONFIG, linear_attn_registry_result=None),
            req_to_token_pool=self.pool,
            attn_backend=SimpleNamespace(update_mamba_state_after_mtp_verify=self._move),
            model=None,
        )
        self.states = RecurrentState.of(SimpleNamespace(model_runner=runner), BLOCK)
        self.held: dict[int, SimpleNamespace] = {}  # row of the slot table -> request
        self.lens = torch.zeros(REQUESTS + 1, dtype=torch.int64)
        self._slots: torch.Tensor

    @property
    def cache(self) -> Any:
        return self.pool.mamba_pool.mamba_cache

    def start(self, state: torch.Tensor, inputs: torch.Tensor, prefix_len: int) -> int:
        """Begins a request as a prefill would: [layers, HEADS, DIM, DIM] and [layers, CHANNELS, TAPS - 1]."""
        req = SimpleNamespace(kv=ReqKvInfo(), inflight_middle_chunks=0)
        row = self.pool.alloc([req])[0]
        self.held[row], self.lens[row] = req, prefix_len
        self.cache.temporal[:, req.kv.mamba_pool_idx] = state
        self.cache.conv[0][:, req.kv.mamba_pool_idx] = inputs.to(self.dtype)
        for pool in (self.cache.temporal, self.cache.conv[0]):
            pool[:, self.snapshots_of(torch.tensor([row]))] = 0  # what was there before is nobody's
        self.states.begin(self._batch(torch.tensor([row])))
        return row

    def end(self, row: int) -> None:
        """A finish, or a retraction."""
        req = self.held.pop(row)
        self.pool.free_mamba_cache(req)
        self.pool.free(req)

    def _batch(self, requests: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=requests,
            seq_lens=self.lens[requests],
            mamba_track_indices=self.snapshots_of(requests),
            tree_cache=SimpleNamespace(page_size=1),
        )

    def snapshots_of(self, requests: torch.Tensor) -> torch.Tensor:
        """[B] int64; places of the requests' snapshots."""
        return self.pool.req_index_to_mamba_ping_pong_track_buffer_mapping[requests, 0]

    def step(self, step: Step) -> torch.Tensor:
        """[layers, T, HEADS, DIM]: the outputs of a verification, whose rows it then commits."""
        slots = self.pool.get_mamba_indices(step.requests).long()
        rows = StateRows(
            slots,
            torch.cat((torch.zeros(1), step.lens.cumsum(0))).long(),
            torch.zeros(len(slots), dtype=torch.bool),
            scratch=torch.arange(len(slots)),
        )
        self._slots, outputs = slots, []
        for layer, inputs in zip(self.layers, step.inputs, strict=True):
            qkv, a, b = inputs.to(self.dtype).split([CHANNELS, HEADS, HEADS], dim=-1)
            cache = self.pool.mamba2_layer_cache(layer.layer_id)
            windows = cache.intermediate_conv_window[0]
            weights = layer.conv_weights.to(self.dtype)
            qkv = self.kernels.causal_conv(qkv.contiguous(), weights, None, cache.conv[0], rows, windows)
            outputs.append(self.verify(self, layer.layer_id, qkv, (a, b), rows, step.requests))
        self.states.commit(self._batch(step.requests), step.commit_lens)
        self.lens[step.requests] += step.commit_lens
        return torch.stack(outputs)

    def _move(
        self,
        last_correct_step_indices: torch.Tensor,
        mamba_track_indices: torch.Tensor,
        mamba_steps_to_track: torch.Tensor,
        **_: Any,
    ) -> None:
        """The commit of states of all rows."""
        requests = torch.arange(len(self._slots))
        kept = (mamba_steps_to_track >= 0).nonzero()[:, 0]
        pairs = [(self._slots, requests, last_correct_step_indices)]
        pairs += [(mamba_track_indices[kept], kept, mamba_steps_to_track[kept])]
        for target, source, row in pairs:
            self.cache.temporal[:, target] = self.cache.intermediate_ssm[:, source, row.long()]
            self.cache.conv[0][:, target] = self.cache.intermediate_conv_window[0][:, source, row.long()]

    def live_states(self, requests: torch.Tensor) -> torch.Tensor:
        """[layers, B, HEADS, DIM, DIM]: the states after the committed rows."""
        states = self.cache.temporal[:, self.pool.get_mamba_indices(requests).long()]
        if self.cache.replayssm_d is None:
            return states
        rings = [
            state_ring.ring_of(self.pool.mamba_pool, self.pool.mamba2_layer_cache(layer)) for layer in range(LAYERS)
        ]
        lens = rings[0].lens[requests].long()
        return torch.stack([ring.after(each, requests, lens) for ring, each in zip(rings, states, strict=True)])


def plain_rule(
    arm: Arm,
    layer: int,
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    rows: StateRows,
    requests: torch.Tensor,
) -> torch.Tensor:
    """With states of all rows."""
    made, cache = arm.layers[layer], arm.pool.mamba2_layer_cache(layer)
    gates = arm.kernels.delta_gates(*gates, made.A_log, made.dt_bias)
    return arm.kernels.delta_rule(qkv, *gates, KEY_HEADS, cache.temporal, rows, cache.intermediate_ssm)


def compare(
    monkeypatch: Any, ring: Arm, plain: Arm, seed: int, steps: int, *, ragged: bool, tolerance: float
) -> tuple[int, bool]:
    """Drives both arms through the same random steps, and asserts equal outputs, states, inputs and snapshots.

    Returns:
        The most places of a ring that a commit has left, and whether a step has written past a ring's last place.
    """
    monkeypatch.setattr(spec_utils, "mamba_track_grid", lambda page_size: GRID)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cursors, length, most, wrapped = ring.pool.mamba_pool, ring.cache.replayssm_d.shape[-2], 0, False

    def close(got: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)

    for _ in range(steps):
        if len(plain.held) < REQUESTS and (not plain.held or rng.random() < 0.4):
            state = torch.randn(LAYERS, HEADS, DIM, DIM, generator=generator) / 8
            inputs, prefix_len = torch.randn(LAYERS, CHANNELS, TAPS - 1, generator=generator), rng.randrange(30)
            row = ring.start(state, inputs, prefix_len)
            assert row == plain.start(state, inputs, prefix_len)
            cursors.replayssm_cache_base[row] = rng.randrange(length)  # an empty ring may begin anywhere
        requests = torch.tensor(rng.sample(sorted(plain.held), rng.randint(1, len(plain.held))))
        width = rng.choice([1, 2, 3, BLOCK, BLOCK])
        lens = torch.tensor([rng.randint(1, width) if ragged else width for _ in requests])
        commit_lens = torch.tensor([rng.choice([1, int(n), rng.randint(1, int(n))]) for n in lens], dtype=torch.int32)
        inputs = torch.randn(LAYERS, int(lens.sum()), CHANNELS + 2 * HEADS, generator=generator)
        step = Step(requests, lens, inputs, commit_lens)
        ends = cursors.replayssm_cache_base[requests] + cursors.replayssm_spec_write_pos[requests] + lens
        wrapped |= bool((ends > length).any())
        close(ring.step(step), plain.step(step))
        held = torch.tensor(sorted(plain.held))
        close(ring.live_states(held), plain.live_states(held))
        places = torch.cat((plain.snapshots_of(held), plain.pool.get_mamba_indices(held).long()))
        assert torch.equal(ring.cache.conv[0][:, places], plain.cache.conv[0][:, places])
        snapshots = plain.snapshots_of(held)
        close(ring.cache.temporal[:, snapshots], plain.cache.temporal[:, snapshots])
        most = max(most, int(cursors.replayssm_spec_write_pos.max()))
        assert not cursors.replayssm_is_flush.any()
        if rng.random() < 0.1:
            row = rng.choice(sorted(plain.held))
            ring.end(row)
            plain.end(row)
    return most, wrapped

"""The recurrent state of targets with mamba or linear-attention layers: committed for the accepted rows only."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs import NemotronHConfig
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.runtime_context import get_schedule
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify
from sglang.srt.utils.common import get_device_memory_capacity

from sglang_cpu.hooks import refusal_of_state
from sglang_dflash.host.worker import state_ring
from sglang_dflash.host.worker.protocols import ScheduleBatch

logger = logging.getLogger(__name__)
GB = 1e9
KIMI_LINEAR = "KimiLinearForCausalLM"  # Kimi delta attention with unbounded decays; other models bound them
DEFAULT_REQUESTS = 48  # SGLang's, with speculation
INPUT_BYTES = 2  # of an input that a convolution keeps; 4 in float32, which hardly matters beside the matrices


def check(cfg: Any, target: Any, block_size: int, on_cpu: bool) -> None:
    """Refuses what cannot be served with recurrent state, and says how much memory a verification takes.

    Args:
        cfg: SGLang's view of the server arguments.
        target: SGLang's `ModelConfig`.
        block_size: rows of a verification, for each of which the state is kept.

    Raises:
        ValueError: one sentence that names the flag.
    """
    config = mambaish_config(target)
    if config is None:
        return
    names = ", ".join(target.hf_config.architectures)
    reason = refusal_of_state(target) if on_cpu else None
    if reason is not None:
        raise ValueError(reason)
    if cfg.enable_streaming_session:
        raise ValueError(
            f"--enable-streaming-session keeps a session's state beyond a stop, and the state of the target {names} "
            "cannot be taken back: leave it out."
        )
    if hybrid_gdn_config(target) is not None and cfg.enable_linear_replayssm_spec:
        length = cfg.linear_replayssm_cache_len
        ring = state_ring.scratch_bytes(config, length, block_size, on_cpu) // cfg.tp_size
        _check_memory(cfg, _gated_delta_bytes(config, cfg) // cfg.tp_size, block_size, ring)
    elif hybrid_gdn_config(target) is not None or KIMI_LINEAR in target.hf_config.architectures:
        _check_memory(cfg, _gated_delta_bytes(config, cfg) // cfg.tp_size, block_size)
    elif isinstance(config, NemotronHConfig):
        _check_memory(cfg, _mamba2_bytes(config, cfg) // cfg.tp_size, block_size)


def _gated_delta_bytes(config: Any, cfg: Any) -> int:
    """Bytes of one request's state in all layers and on all ranks; SGLang computes it only in its schedulers."""
    kimi = getattr(config, "linear_attn_config", None)
    if kimi is not None:
        key_dim, taps = kimi["head_dim"], kimi["short_conv_kernel_size"]
        keys = values = kimi["num_heads"] * key_dim
    else:
        key_dim, taps = config.linear_key_head_dim, config.linear_conv_kernel_dim
        keys = config.linear_num_key_heads * key_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
    convolution = (2 * keys + values) * (taps - 1) * INPUT_BYTES
    return len(config.linear_layer_ids) * (convolution + values * key_dim * _element_bytes(config, cfg))


def _mamba2_bytes(config: NemotronHConfig, cfg: Any) -> int:
    """As `_gated_delta_bytes`, for layers of Mamba-2."""
    values = config.mamba_num_heads * config.mamba_head_dim
    channels = values + 2 * config.n_groups * config.ssm_state_size
    matrices = values * config.ssm_state_size * _element_bytes(config, cfg)
    return len(config.mamba_layer_ids) * (channels * (config.conv_kernel - 1) * INPUT_BYTES + matrices)


def _element_bytes(config: Any, cfg: Any) -> int:
    """Of a state's matrices."""
    named = cfg.mamba_ssm_dtype or getattr(config, "mamba_ssm_dtype", None) or "float32"
    return 4 if named == "float32" else 2


def _weight_bytes(cfg: Any) -> int:
    """Of the target's checkpoint on one rank; 0 where it is not a folder here."""
    files = Path(cfg.model_path).glob("*.safetensors") if Path(cfg.model_path).is_dir() else ()
    return sum(file.stat().st_size for file in files) // cfg.tp_size


def _check_memory(cfg: Any, state_bytes: int, block_size: int, ring_bytes: int | None = None) -> None:
    """state_bytes: of a request's state; ring_bytes: of its ring of updates, None: a verification keeps states."""
    requests = cfg.max_running_requests or DEFAULT_REQUESTS
    if cfg.disaggregation_mode == "decode":
        requests += cfg.disaggregation_decode_extra_slots or 0  # those that arrive have places, too
    request_bytes = state_bytes * block_size if ring_bytes is None else ring_bytes
    scratch_gb = request_bytes * (requests + 1) / GB  # SGLang adds one place for padding
    memory_gb = (get_device_memory_capacity(cfg.device) or 0) * 2**20 / GB
    left_gb = max(0.0, memory_gb - _weight_bytes(cfg) / GB)
    fits = max(0, int(left_gb * GB / request_bytes) - 1)
    flags = f"--max-running-requests {requests} x --speculative-num-draft-tokens {block_size}"
    taken = f"the recurrent states of a verification ({state_bytes / 1e6:.1f} MB each)"
    kept = "one for each row"
    if ring_bytes is not None:
        flags = f"--max-running-requests {requests} x {state_ring.LENGTH} {cfg.linear_replayssm_cache_len}"
        taken = f"rings of updates ({ring_bytes / 1e6:.1f} MB each)"
        kept = f"a ring of updates ({state_ring.NAME})"
    if memory_gb and scratch_gb > left_gb:
        raise ValueError(
            f"{flags} takes {scratch_gb:.1f} GB for {taken}, and the weights leave {left_gb:.1f} of the device's "
            f"{memory_gb:.1f} GB: at most {fits} requests would fit, without caches."
        )
    logger.info(
        "Recurrent state: %.2f MB for each request; a verification keeps %s, which takes %.2f of the %.1f GB that the "
        "weights leave (%s).",
        state_bytes / 1e6,
        kept,
        scratch_gb,
        left_gb,
        flags,
    )


class RecurrentState:
    """A verification leaves the pool of states as it was, and keeps the state after each row in scratch memory, or what
    makes it in a ring of updates."""

    def __init__(self, target_worker: Any, block_size: int) -> None:
        self._target_worker, self._block_size = target_worker, block_size

    @classmethod
    def of(cls, target_worker: Any, block_size: int) -> RecurrentState | None:
        """None for a target without recurrent state."""
        recurrent = mambaish_config(target_worker.model_runner.model_config) is not None
        return cls(target_worker, block_size) if recurrent else None

    def announce(self, config: Any) -> None:
        """Says how many requests will run at once. SGLang lowers the number where its cache of states is too small.

        Args:
            config: SGLang's `MemoryPoolConfig`.
        """
        asked, slots = get_schedule().max_running_requests, get_schedule().max_mamba_cache_size
        level = logging.WARNING if config.max_running_requests < (asked or 0) else logging.INFO
        logger.log(
            level,
            "%d requests run at once (--max-running-requests: %s); the cache of recurrent states has %s places. A "
            "larger --max-mamba-cache-size or --mamba-full-memory-ratio raises both.",
            config.max_running_requests,
            asked,
            slots,
        )

    def begin(self, batch: ScheduleBatch) -> None:
        """Called before the first verification of a batch's requests."""
        state_ring.empty(self._target_worker.model_runner.req_to_token_pool.mamba_pool, batch.req_pool_indices)

    def commit(self, batch: ScheduleBatch, commit_lens: torch.Tensor) -> None:
        """Makes the state after the last accepted row the request's own; and where the request has crossed a point at
        which the prefix cache keeps states, the state there the cache's.

        Called before the new prefix lengths are published: from then on, the scheduler may hand on what the cache
        keeps.

        Args:
            batch: SGLang's `ScheduleBatch`; its `seq_lens` are those before the verification.
            commit_lens: [B] int32, 1 to the step's width.
        """
        # Rows are numbered as in a whole block, whatever the step's width: a ring keeps room for the block to come.
        width = self._block_size
        rows = torch.arange(len(commit_lens) * width, device=commit_lens.device).view(-1, width)
        commit_mamba_states_after_verify(self._target_worker, batch, commit_lens, rows, width)

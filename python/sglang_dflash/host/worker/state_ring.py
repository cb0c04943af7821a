"""A ring of updates in place of the recurrent states of all verified rows (`--enable-linear-replayssm-spec`).

A verification then writes, for each row, an update vector, a key and a decay. The commit stores the state and empties
the ring once another block might not fit. A ring of at most two blocks is emptied at each commit. In a longer one the
stored state lags behind the accepted tokens, so nothing but a commit may read it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
from sglang.srt.runtime_context import get_spec

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.start.version import serves_dflash

LEAST_PLACES = 16  # Triton sums over the places by `tl.dot`, which takes no fewer
NAME, LENGTH = "--enable-linear-replayssm-spec", "--linear-replayssm-cache-len"


def check(cfg: Any, target: Any, block_size: int) -> None:
    """Refuses a ring that would lose updates, or that something would read past.

    Args:
        cfg: SGLang's view of the server arguments, with what it has chosen.
        target: SGLang's `ModelConfig`.
        block_size: rows of a verification, at most.

    Raises:
        ValueError: one sentence that names the flag, its value and what is allowed.
    """
    if not cfg.enable_linear_replayssm_spec:
        return
    if hybrid_gdn_config(target) is None:
        raise ValueError(
            f"{NAME} needs recurrent layers that are gated delta nets (Qwen3.5, Qwen3.6, Qwen3-Next), and the target "
            f"is {', '.join(target.hf_config.architectures)}: leave it out."
        )
    length, least = cfg.linear_replayssm_cache_len, max(LEAST_PLACES, block_size)
    if length < least or length & (length - 1):
        raise ValueError(
            f"{LENGTH} is {length}; allowed: a power of two of at least {least}, because a step writes {block_size} "
            f"rows (--speculative-num-draft-tokens) and a kernel reads {LEAST_PLACES}."
        )
    reader = _reads_stored_states(cfg)
    if lags(cfg, block_size) and reader is not None:
        shorter = f"{2 * block_size} places at most, or " if 2 * block_size >= least else ""
        raise ValueError(
            f"{LENGTH} is {length}, more than twice --speculative-num-draft-tokens {block_size}, so stored states lag "
            f"behind accepted tokens, and {reader[0]} reads them; allowed: {shorter}{reader[1]}."
        )


def lags(cfg: Any, block_size: int) -> bool:
    """Whether a commit may leave updates in the ring. SGLang stores states of 16 bits at each commit."""
    return cfg.mamba_ssm_dtype in (None, "float32") and cfg.linear_replayssm_cache_len > 2 * block_size


def _reads_stored_states(cfg: Any) -> tuple[str, str] | None:
    """What reads a request's stored state while it decodes, and what to ask for instead."""
    if not cfg.disable_radix_cache and cfg.mamba_radix_cache_strategy == "no_buffer":
        return "--mamba-radix-cache-strategy no_buffer", "extra_buffer"
    if cfg.enable_mixed_chunk:
        return "--enable-mixed-chunk", "a server without it"
    backup = cfg.disaggregation_decode_retraction_backup
    if cfg.disaggregation_mode == "decode" and backup != "none":
        return f"--disaggregation-decode-retraction-backup {backup}", "none"
    return None


def scratch_bytes(config: Any, length: int, block_size: int, on_cpu: bool) -> int:
    """Bytes that a verification takes for one request in all layers and on all ranks: a ring of `length` places, and
    a block's windows of inputs of the convolutions. On CUDA the windows share memory.

    A place holds an update and a key, in 32 bits or in twice 16, and a decay; an input has 16 bits. config: of a gated
    delta net.
    """
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    ring = length * 4 * (values + keys + config.linear_num_value_heads)
    taps = config.linear_conv_kernel_dim
    columns = block_size * (taps - 1) if on_cpu else block_size + taps - 2
    return len(config.linear_layer_ids) * (ring + 2 * (2 * keys + values) * columns)


def empty(pool: Any, requests: torch.Tensor) -> None:
    """Begins requests with empty rings.

    SGLang empties them when it gives a request its row of the slot table. Under overlap it does so on another stream
    than the steps, where the last step of the row's former request may still have to commit.

    Args:
        pool: SGLang's `MambaPool`.
        requests: [B] int64; rows of the slot table.
    """
    if pool.replayssm_spec_write_pos is None:
        return
    for cursors in (pool.replayssm_spec_write_pos, pool.replayssm_cache_base, pool.replayssm_is_flush):
        cursors.index_fill_(0, requests, 0)


@hook(
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_req_pool",
    AROUND,
    why="refuses a ring of updates with DFLASH outside of Kimi's layers, because SGLang's own worker would commit "
    "states that do not exist; ours commits through SGLang's helper, which knows the ring",
    until="SGLang's worker commits through it, too",
)
def _with_ring(original: Any, configurator: Any, **sizes: int) -> Any:
    if not serves_dflash():
        return original(configurator, **sizes)
    with get_spec().override(speculative_algorithm=None):  # it is read for the refusal alone
        return original(configurator, **sizes)

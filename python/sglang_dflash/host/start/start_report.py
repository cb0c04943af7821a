"""Says, as lines of JSON, what SGLang would make of server flags: a refusal, or backends, blocks and memory.

`python -m sglang_dflash.host.start.start_report FLAGS` takes the flags of `sglang.launch_server`, resolves them as it
does before any child exists or weight is read, and ends. Each line of standard output that begins with MARK is a
report; what else SGLang prints is not. `sglang-dflash doctor` reads them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = '{"start": '
BYTES_OF = {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5625, "fp4": 0.5625, "bf": 2.0}
"""Beginning of a `--kv-cache-dtype` -> bytes of a number; four bits have a scale of a byte for 16 numbers."""


def say(kind: str, **values: Any) -> None:
    print(f"{MARK}{json.dumps(kind)}, " + json.dumps(values)[1:], flush=True)


def report(flags: list[str]) -> None:
    """Prints `imported`, then `settings`, `refused` (our sentence) or `failed` (the last line of SGLang's error)."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    say("imported", said="SGLang is imported")
    try:
        load_plugins()
        server_args = prepare_server_args(flags)
        server_args.resolve_once()
        say("settings", **settings(server_args, resolving_view(server_args)))
    except SystemExit as refusal:
        if not isinstance(refusal.code, str):
            raise  # of argparse, which has printed why
        say("refused", said=refusal.code)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        say("failed", said=f"{type(error).__name__}: {lines[0]}")


def settings(server_args: Any, cfg: Any) -> dict[str, Any]:
    """What a server with these arguments would use; memory in bytes, of one rank."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    from sglang_dflash.host.start.version import builtin_worker_requested

    target = model_config_of(server_args)
    return {
        "algorithm": cfg.speculative_algorithm,
        "worker": "builtin" if builtin_worker_requested() else "sglang-dflash",
        "device": cfg.device,
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": cfg.attention_backend or f"{cfg.prefill_attention_backend}/{cfg.decode_attention_backend}",
        "draft_attention": cfg.speculative_draft_attention_backend or cfg.attention_backend or "",
        "block_size": cfg.speculative_num_draft_tokens,
        "window": cfg.speculative_draft_window_size,
        "overlap": not cfg.disable_overlap_schedule,
        "radix_cache": not cfg.disable_radix_cache,
        "chunk": cfg.chunked_prefill_size,
        "max_running_requests": cfg.max_running_requests,
        "context": target.context_len,
        "tp_size": cfg.tp_size,
        **memory(server_args, cfg, target),
    }


def memory(server_args: Any, cfg: Any, target: Any) -> dict[str, Any]:
    """Bytes that a token takes in the pools, and what there is for them; by arithmetic, before any weight is read."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.common import get_available_gpu_memory

    draft_bytes, draft_path = 0, cfg.speculative_draft_model_path
    if draft_path is not None:
        revision, cache_dtype = cfg.speculative_draft_model_revision, cfg.speculative_draft_kv_cache_dtype
        draft = ModelConfig.from_server_args(
            server_args, model_path=draft_path, model_revision=revision, is_draft_model=True
        )
        draft_bytes = token_bytes(draft, draft.num_attention_layers, cfg.tp_size, cache_dtype or cfg.kv_cache_dtype)
    hybrid = mambaish_config(target)
    layers = len(hybrid.full_attention_layer_ids) if hybrid is not None else target.num_attention_layers
    return {
        "token_bytes": token_bytes(target, layers, cfg.tp_size, cfg.kv_cache_dtype),
        "draft_token_bytes": draft_bytes,
        "free_bytes": round(get_available_gpu_memory(cfg.device, 0) * 2**30),
        "static_share": cfg.mem_fraction_static,
        "max_total_tokens": cfg.max_total_tokens,
    }


def token_bytes(config: Any, layers: int, tp_size: int, cache_dtype: str) -> int:
    """
    Args:
        config: SGLang's `ModelConfig`.
        layers: those that keep keys and values.
        cache_dtype: of the pool; auto: the model's.
    """
    known = (size for name, size in BYTES_OF.items() if cache_dtype.startswith(name))
    size = next(known, float(config.dtype.itemsize))
    latent = getattr(config, "kv_lora_rank", None)
    if latent:  # MLA: one latent row for all heads
        numbers = latent + config.qk_rope_head_dim
    else:
        numbers = config.get_num_kv_heads(tp_size) * (config.head_dim + config.v_head_dim)
    return round(layers * numbers * size)


if __name__ == "__main__":
    report(sys.argv[1:])

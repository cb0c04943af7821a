"""`--enable-deterministic-inference` on a plain CPU: a request gets the same bits alone and in any batch."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import (
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_exec

from sglang_cpu import ops
from sglang_cpu.detect import ATTENTION_BACKEND
from sglang_cpu.hooking import AROUND, REPLACE, hook
from sglang_cpu.mla import is_latent

# A flag with its own kernels, which are not shown to be batch-invariant here -> its value that asks for nothing.
UNSERVED: dict[str, Any] = {
    "rl_on_policy_target": None,
    "enable_torch_compile": False,
    "enable_lora": None,
    "lora_paths": None,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config keys that hold the number of experts
KV_DTYPES = ("auto", "bf16", "bfloat16")  # of the caches that the native attention reads
MAX_RANKS = 2  # a sum of two is the same in any order; of more, Gloo's order depends on the tensor's size

_kernels: list[torch.library.Library] = []  # kept alive: torch removes the kernels with their library


def install() -> None:
    """Registers the attention backend for this mode, radix cache included, and the checks of the arguments."""
    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    register_resolution_hook("handle_deterministic_inference")(_check_arguments)


@hook(
    "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
    REPLACE,
    why="registers Triton kernels for an accelerator",
    until="SGLang has CPU kernels for it",
)
def use_batch_invariant_kernels(runner: Any) -> None:
    """Installs our batch-invariant kernels. SGLang's are Triton kernels, registered for an accelerator."""
    if get_exec().deterministic.enable_deterministic_inference and not _kernels:
        _kernels.append(ops.install_batch_invariant_kernels())


@hook(
    "sglang.srt.layers.sampler.murmur_hash32",
    REPLACE,
    why="SGLang's CPU body is in the CPU build of `sgl_kernel`",
    until="SGLang has a torch body",
)
def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """See `ops.murmur_hash32`."""
    return ops.murmur_hash32(seeds, positions, columns)


@hook(
    "sglang.srt.layers.sampler.multinomial_with_seed",
    AROUND,
    why="SGLang compiles it: needs a C++ compiler, treats a batch of one apart",
    until="SGLang leaves it eager",
)
def sample_uncompiled(original: Any, *args: Any, **options: Any) -> torch.Tensor:
    """SGLang compiles its seeded sampling, which needs a C++ compiler and treats a batch of one differently."""
    with torch.compiler.set_stance("force_eager"):
        return original(*args, **options)


def _check_arguments(server_args: Any, previous: Any) -> None:
    cfg = resolving_view(server_args)
    if cfg.enable_deterministic_inference or cfg.rl_on_policy_target is not None:
        reason = _unserved(cfg, model_config_of(server_args))
        if reason is not None:
            raise SystemExit(f"--enable-deterministic-inference is not served on the CPU {reason}.")
        if cfg.speculative_algorithm is None:
            # Without speculation but with overlap, SGLang's penalties count an emitted token one step late, or two
            # around a prefill (ScheduleBatch.cumulate_penalty_output_tokens). Our worker has its own counts.
            declare_resolution(server_args, "sglang_cpu.deterministic", disable_overlap_schedule=True)
    previous(server_args)


def _unserved(cfg: Any, model: Any) -> str | None:
    """Why a row could depend on others; None if it cannot.

    model: SGLang's `ModelConfig`.
    """
    for name, neutral in UNSERVED.items():
        value = getattr(cfg, name)
        if value != neutral and value not in (None, False):
            return f"with --{name.replace('_', '-')} {value}: leave it out"
    backends = {cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend} - {None}
    if backends != {ATTENTION_BACKEND}:
        return (
            f"with --attention-backend {', '.join(sorted(backends))}: only {ATTENTION_BACKEND}, the default, serves it"
        )
    if not ops.native.serves("cpu"):
        return f"without the native ops, whose rows do not depend on each other ({ops.native.described()})"
    if not ops.native.serves("cpu", model.dtype):
        return f"with --dtype {str(model.dtype).removeprefix('torch.')}: float32 and bfloat16 are"
    if cfg.kv_cache_dtype not in KV_DTYPES:
        return f"with --kv-cache-dtype {cfg.kv_cache_dtype}: {', '.join(KV_DTYPES)} are"
    if cfg.tp_size > MAX_RANKS:
        return f"with --tp-size {cfg.tp_size}: at most {MAX_RANKS}"
    if is_latent(model):
        return f"with latent attention ({', '.join(model.hf_config.architectures)})"
    if model.quantization is not None:
        return f"with quantised weights ({model.quantization})"
    experts = next((name for name in EXPERTS if (getattr(model.hf_text_config, name, None) or 0) > 0), None)
    if experts is not None:
        return f"with a mixture of experts ({experts} {getattr(model.hf_text_config, experts)})"
    if mambaish_config(model) is not None:
        return f"with recurrent state ({', '.join(model.hf_config.architectures)})"
    return None

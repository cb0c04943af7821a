"""Replaces code of SGLang 0.5.23 that would fail or be slow on a CPU."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from sglang.srt.arg_groups import model_hook
from sglang.srt.arg_groups.choices import (
    add_attention_backend_choices,
    add_draft_attention_backend_choices,
)
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.environ import envs
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from torch.overrides import TorchFunctionMode

from sglang_cpu.detect import ATTENTION_BACKEND
from sglang_cpu.hooking import AROUND, REPLACE, hook

OVERLAP_VARIABLE = "SGLANG_DFLASH_OVERLAP"


@hook(
    "sglang.srt.mem_cache.allocation.get_last_loc",
    REPLACE,
    why="launches Triton at page sizes above 1",
    until="SGLang asks its platform here",
)
def get_last_loc(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """With page sizes above 1, SGLang launches Triton unless the attention backend is named "torch_native"."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


@hook(
    "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
    REPLACE,
    why="Triton and AMX bodies only",
    until="SGLang asks its platform here",
)
def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Writes newly allocated slots into the requests' rows; SGLang has only Triton and AMX code for it."""
    if batch_size == 1:
        req_to_token[req_pool_indices[0], int(start_offset) : int(end_offset)] = out_cache_loc.to(req_to_token.dtype)
        return
    lengths = (end_offset - start_offset).long()  # [B]
    rows = torch.repeat_interleave(req_pool_indices.long(), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    columns = torch.arange(len(rows)) + torch.repeat_interleave(start_offset.long() - first, lengths)
    req_to_token[rows, columns] = out_cache_loc.to(req_to_token.dtype)


@hook(
    "sglang.srt.utils.numa_utils.init_threads_binding",
    REPLACE,
    why="ends with more ranks than NUMA nodes; binds through `sgl_kernel` only",
    until="SGLang asks its platform here",
)
def leave_threads_unbound(*, numa_index: int, world_size: int) -> None:
    """Does nothing. SGLang exits with more ranks than NUMA nodes, and binds threads only through `sgl_kernel`."""


class Unpinned(TorchFunctionMode):
    """Leaves memory unpinned: without an accelerator, torch refuses to pin."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


@hook(
    "sglang.srt.lora.lora_manager.LoRAManager.init_state",
    AROUND,
    why="pins memory whatever the platform says",
    until="SGLang asks its platform here",
)
@hook(
    "sglang.srt.lora.lora_manager.LoRAManager.update_lora_info",
    AROUND,
    why="pins memory whatever the platform says",
    until="SGLang asks its platform here",
)
@hook(
    "sglang.srt.lora.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch",
    AROUND,
    why="pins memory whatever the platform says",
    until="SGLang asks its platform here",
)
def leave_unpinned(original: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's LoRA layers and batches pin their offsets without asking the platform."""
    with Unpinned():
        return original(*args, **kwargs)


@hook(
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
    REPLACE,
    why="has no body for a CPU, unlike the grammars' own; strict thinking needs it where a request has no grammar",
    until="SGLang's has one",
)
def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Sets the logits [T, V] of the tokens that are not in `vocab_mask` ([T, V / 32] int32, a bit each) to -inf."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


@hook(
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
    REPLACE,
    why="warms up a Triton copy that only tree verification uses",
    until="SGLang asks its platform here",
)
def skip_kv_copy_warmup(pool: Any) -> None:
    """With speculation on, SGLang warms up a Triton KV copy that only tree verification uses."""
    pool._kv_copy_config = None


@hook(
    "sglang.srt.model_executor.runner.eager_runner.EagerRunner.load_batch",
    AROUND,
    why="makes a batch anew from its hundred fields at each forward",
    until="SGLang copies shallowly",
)
def copy_batch(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Without the copy of tensors, SGLang still rebuilds the batch from its hundred fields at each forward."""
    if envs.SGLANG_EAGER_INPUT_NO_COPY.get():
        return copy.copy(forward_batch)
    return original(runner, forward_batch, *args, **kwargs)


def install() -> None:
    """Registers the attention backend, the flag's choices and the argument defaults of the CPU platform."""
    add_attention_backend_choices([ATTENTION_BACKEND])
    add_draft_attention_backend_choices([ATTENTION_BACKEND])

    @register_attention_backend(ATTENTION_BACKEND)
    def make_backend(runner: Any) -> Any:
        from sglang_cpu.attention import CpuAttentionBackend

        return CpuAttentionBackend(runner)

    if not envs.SGLANG_EAGER_INPUT_NO_COPY.is_set():
        # SGLang copies every batch into fixed buffers, which only an accelerator's graphs need.
        envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)
    envs.SGLANG_NATIVE_MOVE_KV_CACHE.set(True)  # torch's indexing instead of a Triton kernel
    register_resolution_hook("handle_missing_default_values")(_first_defaults)
    register_resolution_hook("handle_cpu_backends")(_cpu_defaults)
    register_resolution_hook("handle_model_specific_adjustments")(_accept_our_attention)
    # SGLang's own DFLASH worker calls record_stream on CPU tensors (dflash_worker_v2.py:2481), which torch refuses.
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]


def _first_defaults(server_args: Any, previous: Any) -> None:
    """Before SGLang chooses for some models: it would take attention of Triton or AMX, and for gpt-oss a layout of
    the experts' weights that only Triton reads."""
    cfg = resolving_view(server_args)
    if cfg.device != "cpu":
        raise SystemExit(
            f"No accelerator was found and --device is {cfg.device!r}: to serve on the CPU, pass --device cpu "
            "(device='cpu' for sgl.Engine); otherwise check the accelerator's driver."
        )
    defaults = {}
    if cfg.attention_backend is None:
        defaults["attention_backend"] = ATTENTION_BACKEND
    if cfg.moe_runner_backend == "auto":
        defaults["moe_runner_backend"] = "triton"  # on a CPU: torch, with weights as they are in a checkpoint
    if defaults:
        declare_resolution(server_args, "sglang_cpu.defaults", **defaults)
    previous(server_args)


def _accept_our_attention(server_args: Any, previous: Any) -> None:
    """For gpt-oss and Gemma 4 SGLang accepts only the attention backends of a list, those with windows and sinks.
    Ours has both, and passes for "triton" here."""
    named = model_hook.attention_backends_of

    def listed(cfg: Any) -> tuple[str, ...]:
        return tuple("triton" if name == ATTENTION_BACKEND else name for name in named(cfg))

    model_hook.attention_backends_of = listed
    try:
        previous(server_args)
    finally:
        model_hook.attention_backends_of = named


def _cpu_defaults(server_args: Any, previous: Any) -> None:
    cfg = resolving_view(server_args)
    ranks = cfg.tp_size * cfg.dp_size // cfg.nnodes  # of this machine
    if ranks > 1 and cfg.max_total_tokens is None and cfg.mem_fraction_static is None:
        raise SystemExit(
            f"{ranks} ranks (--tp-size x --dp-size) would each take all memory of this machine for their KV: limit the "
            "tokens of each with --max-total-tokens."
        )
    defaults: dict[str, Any] = {}
    if cfg.lora_backend == "csgmv":
        defaults["lora_backend"] = "torch_native"  # SGLang's default needs Triton
    if not cfg.sleep_on_idle:
        defaults["sleep_on_idle"] = True  # otherwise an idle scheduler keeps one core busy
    if not (cfg.disable_overlap_schedule or _wants_overlap(cfg)):
        defaults["disable_overlap_schedule"] = True
    if defaults:
        declare_resolution(server_args, "sglang_cpu.defaults", **defaults)
    previous(server_args)


def _wants_overlap(cfg: Any) -> bool:
    """Whether overlap scheduling stays on, which does not help on a CPU.

    With overlap, SGLang launches a step before it handles the previous step's result. On a CPU a launched step runs
    at once: each token would wait for the step after its own, and a finished request would take part in one more step.

    SGLang's prefill delayer asserts that overlap is on. SGLang's flag can only switch overlap off, so a variable
    switches it on, to test what CUDA runs.
    """
    return os.environ.get(OVERLAP_VARIABLE, "0") == "1" or cfg.enable_prefill_delayer

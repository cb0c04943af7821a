"""Our hooks into SGLang, and the check that each is in place, so that SGLang never falls back silently."""

from __future__ import annotations

import sys
from typing import Any

import sglang_cpu.hooks
from sglang_cpu.detect import cpu_platform_in_use
from sglang_cpu.hooking import AROUND, REPLACE, Hook, hook, hooks_of
from sglang_dflash.host.start import propagation
from sglang_dflash.host.start.version import builtin_worker_requested, require_supported_sglang, serves_dflash

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
VALIDATE_REQUEST = "sglang.srt.speculative.dflash_utils.validate_dflash_request"


def install() -> None:
    """Registers every hook of this process; SGLang applies them right after.

    Raises:
        SystemExit: the installed SGLang is not the pinned one.
    """
    require_supported_sglang()
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    propagation.install()
    for ours in registered_hooks().values():
        HookRegistry.register(ours.target, ours.function, HookType[ours.kind])
    if cpu_platform_in_use():
        sglang_cpu.hooks.install()
    register_resolution_hook("handle_deprecated_dp_attention")(_check_features)  # SGLang's first check
    register_resolution_hook("handle_speculative_decoding")(_check_arguments)


def worker_hooks() -> list[Hook]:
    """The hooks of our worker, and those that both workers need."""
    from sglang_dflash.host.patches import (
        block_results,
        capture,
        disaggregation,
        draft_layers,
        packed_gdn,
        ragged,
        sampler,
        sessions,
        stored_kv,
        streamed_text,
        weights,
    )
    from sglang_dflash.host.start import features, requests
    from sglang_dflash.host.worker import metrics, row_report, sampling_masks, state_ring, trees, trimmed_rows

    modules = [sys.modules[__name__], block_results, capture, sampler, sessions, weights, features, requests]
    modules += [disaggregation, draft_layers, metrics, ragged, row_report, sampling_masks, stored_kv, streamed_text]
    modules += [packed_gdn, state_ring, trees, trimmed_rows]
    return [ours for module in modules for ours in hooks_of(module).values()]


def registered_hooks() -> dict[str, Hook]:
    """Target -> hook, of every hook of this process.

    Those of the worker are in place unless SGLang's own worker is asked for, or always where they say so. Those of the
    CPU platform are in place on it.
    """
    found = worker_hooks()
    if builtin_worker_requested():
        found = [ours for ours in found if ours.always]
    if cpu_platform_in_use():
        found += sglang_cpu.hooks.platform_hooks()
    hooks = {ours.target: ours for ours in found}
    assert len(hooks) == len(found), sorted(ours.target for ours in found)
    return hooks


def missing_hooks() -> list[str]:
    """Targets that SGLang failed to patch, or where another plugin's replacement came after ours.

    SGLang's registry only logs a failed patch, and lets the last replacement win.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    missing = []
    for target, ours in registered_hooks().items():
        replacements = [function for kind, function, _ in HookRegistry._hooks[target] if kind == HookType.REPLACE]
        overridden = ours.kind == REPLACE and replacements[-1:] != [ours.function]
        if target not in HookRegistry._patched or overridden:
            missing.append(target)
    return sorted(missing)


def require_hooks() -> None:
    """Raises SystemExit where one of our hooks is not in place in this process."""
    missing = missing_hooks()
    if missing:
        raise SystemExit(
            f"sglang-dflash could not hook into SGLang at {', '.join(missing)}: "
            "the installation is damaged or another plugin interferes; see the log above."
        )


def _check_features(server_args: Any, previous: Any) -> None:
    from sglang_dflash.host.start import arguments

    arguments.check_features(server_args, previous)


def _check_arguments(server_args: Any, previous: Any) -> None:
    """Runs in the main process, before any child exists and any weight is read."""
    from sglang_dflash.host.start import arguments

    if arguments.asks_for_dflash(server_args) or cpu_platform_in_use():
        require_hooks()
    if cpu_platform_in_use():
        sglang_cpu.hooks.check()
    arguments.check(server_args, previous)


@hook(
    CREATE_WORKER,
    AROUND,
    why="gives DFLASH our worker",
    until="SGLang lets a plugin name the worker of a built-in algorithm",
)
def _create_worker(original: Any, algorithm: Any, server_args: Any) -> Any:
    if algorithm.is_dflash():
        require_hooks()  # again: the scheduler is a separate process
        from sglang_dflash.host.patches.block_results import restore_prefill_only
        from sglang_dflash.host.worker.build import build_worker

        restore_prefill_only()
        return build_worker
    return original(algorithm, server_args)


@hook(
    VALIDATE_REQUEST,
    REPLACE,
    why="our worker honours and refuses other requests than SGLang's",
    until="stays",
)
def _validate_request(req: Any, enable_overlap: bool) -> str | None:
    from sglang_dflash.host.start.requests import refuse_unsupported

    return refuse_unsupported(req)


@hook(
    "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
    AROUND,
    why="a request's row has room for one block past the context at page size 1, and two are reserved: the "
    "next row would be overwritten (SGLang issue 33579)",
    until="the issue is fixed",
    always=True,
)
def _row_headroom(original: Any) -> int:
    """At page size 1, SGLang gives a request's row room for one block beyond the context, but reserves two. The last
    blocks before the context limit would overwrite the next request's row (SGLang issue 33579)."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

    if not serves_dflash():
        return original()
    return max(original(), get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


@hook(
    "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
    AROUND,
    why="SGLang casts input embeddings to bfloat16 whatever the draft's dtype is",
    until="SGLang keeps the dtype",
    always=True,
)
def _keep_draft_dtype(original: Any, runner: Any, forward_batch: Any, pp_proxy_tensors: Any) -> dict[str, Any]:
    """SGLang casts input embeddings to bfloat16 whatever the model's dtype is (model_runner.py:1772)."""
    kwargs = original(runner, forward_batch, pp_proxy_tensors)
    if runner.is_draft_worker and runner.spec_algorithm.is_dflash() and forward_batch.input_embeds is not None:
        kwargs["input_embeds"] = forward_batch.input_embeds
    return kwargs

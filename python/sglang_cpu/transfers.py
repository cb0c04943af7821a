"""Prefill and decode on two servers on a plain CPU: KV goes over TCP, without pinned memory and events of CUDA."""

from __future__ import annotations

import importlib
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from sglang_cpu.hooking import AROUND, hook

FLAG = "--disaggregation-transfer-backend"
TCP = "mooncake_tcp"
ENGINE = "mooncake.engine"


@hook(
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
    AROUND,
    why="copies the pages' numbers into pinned memory, beside an event of CUDA",
    until="SGLang asks its platform here",
)
def _plain_numbers(original: Any, queue: Any) -> Any:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False
    return original(queue)


@hook(
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
    AROUND,
    why="under overlap, a cached prefix is sent early behind an event of CUDA",
    until="SGLang asks its platform here",
)
def _send_after_the_forward(original: Any, scheduler: Any, req: Any, allow_send: bool = True) -> None:
    """Without the early start, the prefix is sent with the rest."""
    original(scheduler, req, allow_send and not scheduler.enable_overlap)


def install() -> None:
    """Registers TCP as the way that KV takes on a CPU."""
    register_resolution_hook("handle_pd_disaggregation")(_resolve)


def _resolve(server_args: Any, previous: Any) -> None:
    cfg = resolving_view(server_args)
    if cfg.disaggregation_mode in ("prefill", "decode"):
        backend = cfg.disaggregation_transfer_backend
        if backend not in ("mooncake", TCP):
            raise SystemExit(
                f"{FLAG} is {backend}, which takes memory of an accelerator; allowed on a CPU: {TCP}, the default here."
            )
        try:
            importlib.import_module(ENGINE)
        except ImportError as error:
            raise SystemExit(
                f"--disaggregation-mode {cfg.disaggregation_mode} needs Mooncake, which cannot be loaded ({error}): "
                "install the wheel mooncake-transfer-engine-non-cuda (pip install 'sglang-dflash[pd]') and the "
                "system's libibverbs (Debian's libibverbs1)."
            ) from None
        declare_resolution(server_args, "sglang_cpu.transfers", disaggregation_transfer_backend=TCP)
    previous(server_args)

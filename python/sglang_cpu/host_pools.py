"""SGLang's second level of KV (HiCache) on a plain CPU: its pools are ordinary memory, and torch copies the KV."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.mem_cache.pool_host import base

from sglang_cpu.hooking import AROUND, hook

POOLS = "sglang.srt.mem_cache.pool_host"
FLAG = "--hicache-io-backend"
DIRECT, BY_PAGES, BY_LAYERS = "direct", "page_first_direct", "layer_first"
RESERVED_SHARE = 8
"""At least this share of a machine's memory stays free. SGLang leaves 10 GiB, more than small machines have."""
Layers = Sequence[torch.Tensor]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Torch indexes no FP8."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _copy(source: torch.Tensor, taken: Any, target: torch.Tensor, written: Any) -> None:
    _bytes(target)[written] = _bytes(source)[taken]


def transfer_kv_direct(
    src_layers: Layers, dst_layers: Layers, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copies the rows of some slots, layer by layer; stands for the op of this name in `sgl_kernel.kvcacheio`.

    Args:
        src_layers, dst_layers: [slots, ...] each, of one dtype; written in place.
        src_indices, dst_indices: [N] int64, in whole pages.
    """
    for source, target in zip(src_layers, dst_layers, strict=True):
        _copy(source, src_indices, target, dst_indices)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Layers,
    dst_ptrs: Layers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer of some slots from pools of whole pages.

    Args:
        src_ptrs: [pages, layers, page_size, ...] each.
        dst_ptrs: [slots, ...] each; written in place.
        src_indices, dst_indices: [N] int64, in whole pages.
    """
    pages = src_indices // page_size, layer_id, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        _copy(source, pages, target, dst_indices)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Layers, dst_ptrs: Layers, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copies all layers of some slots to pools of whole pages.

    Args:
        src_ptrs: [slots, ...] each: all layers of the first pool, then those of the next.
        dst_ptrs: [pages, layers, page_size, ...] each; written in place.
        src_indices, dst_indices: [N] int64, in whole pages.
    """
    layers, page, row = len(src_ptrs) // len(dst_ptrs), dst_indices // page_size, dst_indices % page_size
    for index, source in enumerate(src_ptrs):
        _copy(source, src_indices, dst_ptrs[index // layers], (page, index % layers, row))


COPIES = (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf)


@hook(
    "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__",
    AROUND,
    why="registers a pool's memory with CUDA, and has no copies for a CPU",
    until="SGLang asks its platform here",
)
@hook(
    "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost.__init__",
    AROUND,
    why="registers a pool's memory with CUDA, and has no copies for a CPU",
    until="SGLang asks its platform here",
)
def _ordinary_memory(original: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang imports its copies by name into the modules of the pools, on CUDA, HIP and XPU only."""
    for module in (sys.modules[f"{POOLS}.{name}"] for name in ("mha", "mla", "mamba")):
        for copy in COPIES:
            setattr(module, copy.__name__, copy)
    original(pool, *args, **{**kwargs, "pin_memory": False})


def install() -> None:
    """Registers the defaults of HiCache on a CPU: `direct` copies, a layout that they know, less memory left free."""
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = min(
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES, psutil.virtual_memory().total // RESERVED_SHARE
    )
    register_resolution_hook("handle_hicache")(_resolve)


def _resolve(server_args: Any, previous: Any) -> None:
    cfg = resolving_view(server_args)
    if not cfg.enable_hierarchical_cache and cfg.disaggregation_mode == "null":
        previous(server_args)
        return
    by_hand = any(word.partition("=")[0] == FLAG for word in sys.argv)
    if cfg.hicache_io_backend != DIRECT and by_hand:
        raise SystemExit(
            f"{FLAG} is {cfg.hicache_io_backend}, which needs an accelerator's kernels; allowed on a CPU: {DIRECT}, "
            "the default here."
        )
    layout = BY_PAGES if cfg.hicache_mem_layout == "page_first" else cfg.hicache_mem_layout  # SGLang's default
    if layout not in (BY_PAGES, BY_LAYERS):
        raise SystemExit(
            f"--hicache-mem-layout is {layout}, which needs kernels of an accelerator; allowed on a CPU: {BY_PAGES}, "
            f"the default here, and {BY_LAYERS}."
        )
    declare_resolution(server_args, "sglang_cpu.host_pools", hicache_io_backend=DIRECT, hicache_mem_layout=layout)
    previous(server_args)

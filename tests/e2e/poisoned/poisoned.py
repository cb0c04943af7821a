"""A plugin of SGLang that makes lost draft KV loud: whenever slots are handed out, the draft's KV there becomes NaN.

A draft that reads one such row proposes nothing that is accepted, until the request ends. The log gets, per prefill,
how many tokens the request had emitted, and, at a request's first block behind a prompt, a digest of the draft's KV of
the prompt's whole pages.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

logger = logging.getLogger("sglang.poisoned")
PAGE = 16  # a digest is of whole pages: what is left of a prompt is prefilled anew, and its bits depend on the rows
ALLOCATORS = {"token.TokenToKVPoolAllocator": ("alloc",)}
ALLOCATORS["paged.PagedTokenToKVPoolAllocator"] = ("alloc", "alloc_extend", "alloc_decode")


def activate() -> None:
    """Entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker", _use, HookType.BEFORE)


def _use(*_: Any) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler
    from sglang.srt.mem_cache import allocator

    from sglang_dflash.host.worker.worker import DFlashWorker

    # A `PreloadedServer` has imported these before it got its variables.
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
    watch = _Watch()
    for name, methods in ALLOCATORS.items():
        module, cls = name.split(".")
        owner = getattr(getattr(allocator, module), cls)
        for method in methods:
            setattr(owner, method, watch.poisoning(getattr(owner, method)))
    DFlashWorker.alloc_memory_pool = watch.bound(DFlashWorker.alloc_memory_pool)  # type: ignore[method-assign]
    DFlashWorker._prefill = watch.prefill(DFlashWorker._prefill)  # type: ignore[method-assign]
    DFlashWorker._decode = watch.decode(DFlashWorker._decode)  # type: ignore[method-assign]


def nan_of(rows: torch.Tensor) -> float:
    """FP8 lies in a pool as bytes; seven ones are its NaN."""
    return 0x7F if rows.dtype == torch.uint8 else float("nan")


class _Watch:
    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []  # keys and values of the draft's layers, [slots, ...] each
        self.seen: set[str] = set()

    def poisoning(self, allocate: Any) -> Any:
        def poisoned(*args: Any, **kwargs: Any) -> Any:
            slots = allocate(*args, **kwargs)
            if slots is not None:
                for rows in self.rows:
                    rows[slots.long()] = nan_of(rows)
            return slots

        return poisoned

    def bound(self, original: Any) -> Any:
        def alloc_memory_pool(worker: Any, *args: Any, **kwargs: Any) -> None:
            original(worker, *args, **kwargs)
            pool = worker.model_runner.token_to_kv_pool
            self.rows = [*pool.k_buffer, *pool.v_buffer]
            for rows in self.rows:
                rows.fill_(nan_of(rows))

        return alloc_memory_pool

    def prefill(self, original: Any) -> Any:
        def _prefill(worker: Any, batch: Any, *args: Any) -> Any:
            for req in batch.reqs:
                logger.info("prefill of %s after %d tokens", req.rid, len(req.output_ids))
            return original(worker, batch, *args)

        return _prefill

    def decode(self, original: Any) -> Any:
        def _decode(worker: Any, batch: Any, *args: Any) -> Any:
            for req in batch.reqs:
                if req.rid not in self.seen:
                    self.seen.add(req.rid)
                    end = (len(req.origin_input_ids) - 1) // PAGE * PAGE
                    slots = batch.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :end]
                    held = b"".join(
                        rows[slots.long()].contiguous().view(torch.uint8).numpy().tobytes() for rows in self.rows
                    )
                    logger.info("draft KV of %s: %s", req.rid, hashlib.sha256(held).hexdigest()[:12])
            return original(worker, batch, *args)

        return _decode

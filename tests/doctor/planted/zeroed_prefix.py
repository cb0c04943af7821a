"""A plugin of SGLang that zeroes the draft's KV behind every prefix hit: answers stay right, acceptance is lost."""

from __future__ import annotations

from typing import Any


def activate() -> None:
    """Entry point: hooks what makes the worker, in the scheduler's process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker", _plant, HookType.BEFORE)


def _plant(*_: Any) -> None:
    from sglang_dflash.host.worker.worker import DFlashWorker

    original = DFlashWorker._prefill

    def prefill(worker: Any, batch: Any, *rest: Any) -> Any:
        table, pool = worker._target.req_to_token_pool.req_to_token, worker._draft.runner.token_to_kv_pool
        for row, length in zip(batch.req_pool_indices.tolist(), batch.prefix_lens, strict=True):
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[table[row, :length].long()] = 0
        return original(worker, batch, *rest)

    DFlashWorker._prefill = prefill

"""The draft's state between two steps, and the KV slots that the next step may write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2, _get_overlap_plan_stream
from sglang.srt.utils.common import is_pin_memory_available

from sglang_dflash.host.worker.protocols import ScheduleBatch

AHEAD = 16
"""Tokens, beyond what the next step may need, for which slots are allocated while there is room."""
ROOM = 4
"""There is room while the pool has this many times the slots asked for. Otherwise other requests may need them."""


class DraftInput(DFlashDraftInputV2):
    """SGLang's DFLASH draft state with a vectorised `prepare_for_decode`.

    Filtering, merging and the relay of bonus ids between steps are SGLang's.
    """

    @classmethod
    def create(cls, bonus_ids: torch.Tensor, prefix_lens: torch.Tensor) -> DraftInput:
        """bonus_ids, prefix_lens: [B] int64. EAGLE-shaped fields are empty: the relay carries only the bonus."""
        fields = _no_fields(len(bonus_ids), bonus_ids.device)
        return cls(bonus_tokens=bonus_ids.long(), new_seq_lens=prefix_lens.long(), **fields)

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserves two blocks of slots beyond the committed tokens of every request of a `ScheduleBatch`.

        Two, because under overlap the committed lengths that SGLang knows lag by one step. While there is room, all
        requests get slots for AHEAD more tokens whenever one lacks any, so that most steps allocate nothing.
        """
        reqs = batch.reqs
        if not reqs:
            return
        batch.maybe_evict_swa()
        committed = [req.kv.kv_committed_len for req in reqs]
        allocated = [req.kv.kv_allocated_len for req in reqs]
        allocator = batch.token_to_kv_pool_allocator
        reserve, page_size = get_alloc_reserve_per_decode(), allocator.page_size
        reserved = reserve_lens(committed, allocated, reserve, page_size)
        row_width = batch.req_to_token_pool.req_to_token.shape[1]
        assert max(reserved) <= row_width, (max(reserved), row_width)
        if reserved != allocated:
            more = reserve_lens(committed, allocated, reserve + AHEAD, page_size)
            if max(more) <= row_width and ROOM * (sum(more) - sum(allocated)) <= allocator.available_size():
                reserved = more
            self._allocate(batch, allocated, reserved)
        for req in reqs:
            req.decode_batch_idx += 1
        batch.seq_lens_cpu = torch.tensor(committed)  # [B] int64
        batch.seq_lens_sum = sum(committed)
        self.nxt_kv_lens_cpu = torch.tensor(reserved)
        self.nxt_kv_lens_sum = sum(reserved)

    def _allocate(self, batch: ScheduleBatch, allocated: list[int], reserved: list[int]) -> None:
        allocated_cpu = torch.tensor(allocated, dtype=torch.int32)
        reserved_cpu = torch.tensor(reserved, dtype=torch.int32)
        plan_stream, plan_context = _get_overlap_plan_stream(batch.device)
        caller_stream = None
        if plan_stream is not None:
            caller_stream = torch.get_device_module(batch.device).current_stream()
        with plan_context:
            if caller_stream is not None:
                plan_stream.wait_stream(caller_stream)  # filter and merge may just have rebuilt the row indices
            alloc_for_spec_decode(
                batch.tree_cache,
                batch.req_to_token_pool,
                reqs=batch.reqs,
                req_pool_indices=batch.req_pool_indices,
                cur_kv_lens=upload(allocated_cpu, batch.device),
                cur_kv_lens_cpu=allocated_cpu,
                nxt_kv_lens=upload(reserved_cpu, batch.device),
                nxt_kv_lens_cpu=reserved_cpu,
                num_needed_tokens=sum(reserved) - sum(allocated),
                batch=batch,
            )
        if caller_stream is not None:
            caller_stream.wait_stream(plan_stream)  # the forward must not see half-written rows


def known_kv_lens(batch: ScheduleBatch, extra: int) -> tuple[torch.Tensor, int]:
    """Upper bounds of the KV that a step reads if it adds `extra` rows to the prefixes: [B] int64 on the CPU, and their
    sum.

    Under overlap, if no attention backend asks for lengths on the CPU, SGLang keeps none there. Then the reserved
    lengths are the bounds.
    """
    lens_cpu = batch.seq_lens_cpu
    if lens_cpu is None:
        return batch.spec_info.nxt_kv_lens_cpu, batch.spec_info.nxt_kv_lens_sum
    assert batch.seq_lens_sum is not None
    return (lens_cpu + extra if extra else lens_cpu), batch.seq_lens_sum + extra * len(lens_cpu)


@contextmanager
def bounded_kv_lens(batch: ScheduleBatch, extra: int) -> Iterator[None]:
    """Within it the batch's lengths on the CPU are those of `known_kv_lens`, which SGLang's preparation reads."""
    before = batch.seq_lens_cpu, batch.seq_lens_sum
    batch.seq_lens_cpu, batch.seq_lens_sum = known_kv_lens(batch, extra)
    try:
        yield
    finally:
        batch.seq_lens_cpu, batch.seq_lens_sum = before


@lru_cache(maxsize=64)
def _no_fields(batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        "topk_p": torch.empty((batch, 0), dtype=torch.float32, device=device),
        "topk_index": torch.empty((batch, 0), dtype=torch.int64, device=device),
        "hidden_states": torch.empty((batch, 0), dtype=torch.float16, device=device),
    }


def upload(tensor_cpu: torch.Tensor, device: Any) -> torch.Tensor:
    """Copies a tensor to `device`, through pinned memory where available, so that the CPU does not wait."""
    if is_pin_memory_available(device):
        tensor_cpu = tensor_cpu.pin_memory()
    return tensor_cpu.to(device, non_blocking=True)


def reserve_lens(committed: list[int], allocated: list[int], reserve: int, page_size: int) -> list[int]:
    """Slots that each request must own before the step: committed + reserve in whole pages, or more if it owns more."""
    ahead = reserve + page_size - 1
    return [
        max(owned, (length + ahead) // page_size * page_size)
        for length, owned in zip(committed, allocated, strict=True)
    ]

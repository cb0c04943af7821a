"""The draft's state between two steps, and the KV slots that the next step may write."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2, _get_overlap_plan_stream
from sglang.srt.utils.common import is_pin_memory_available


class DraftInput(DFlashDraftInputV2):
    """SGLang's DFLASH draft state with a vectorised `prepare_for_decode`.

    Filtering, merging and the relay of bonus ids between steps are the host's.
    """

    @classmethod
    def create(cls, bonus_ids: torch.Tensor, prefix_lens: torch.Tensor) -> DraftInput:
        """bonus_ids, prefix_lens: [B] int64. EAGLE-shaped fields are empty: the relay carries only the bonus."""
        batch, device = len(bonus_ids), bonus_ids.device
        return cls(
            topk_p=torch.empty((batch, 0), dtype=torch.float32, device=device),
            topk_index=torch.empty((batch, 0), dtype=torch.int64, device=device),
            bonus_tokens=bonus_ids.long(),
            new_seq_lens=prefix_lens.long(),
            hidden_states=torch.empty((batch, 0), dtype=torch.float16, device=device),
        )

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserves two blocks of slots beyond the committed tokens of every request of a `ScheduleBatch`.

        Two, because under overlap the committed lengths that the host knows lag by one step.
        """
        reqs = batch.reqs
        if not reqs:
            return
        batch.maybe_evict_swa()
        page_size = batch.token_to_kv_pool_allocator.page_size
        committed_cpu = torch.tensor([req.kv.kv_committed_len for req in reqs])  # [B] int64
        allocated_cpu = torch.tensor([req.kv.kv_allocated_len for req in reqs])
        reserved_cpu = reserve_lens(committed_cpu, allocated_cpu, get_alloc_reserve_per_decode(), page_size)
        row_width = batch.req_to_token_pool.req_to_token.shape[1]
        assert int(reserved_cpu.max()) <= row_width, (reserved_cpu.max(), row_width)
        self._allocate(batch, allocated_cpu.int(), reserved_cpu.int())
        for req in reqs:
            req.decode_batch_idx += 1
        batch.seq_lens_cpu = committed_cpu
        batch.seq_lens_sum = int(committed_cpu.sum())
        self.nxt_kv_lens_cpu = reserved_cpu
        self.nxt_kv_lens_sum = int(reserved_cpu.sum())

    def _allocate(self, batch: Any, allocated_cpu: torch.Tensor, reserved_cpu: torch.Tensor) -> None:
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
                num_needed_tokens=int((reserved_cpu - allocated_cpu).sum()),
                batch=batch,
            )
        if caller_stream is not None:
            caller_stream.wait_stream(plan_stream)  # the forward must not see half-written rows


def known_kv_lens(batch: Any, extra: int) -> torch.Tensor:
    """[B] int64 on the CPU: how far a step that adds `extra` rows to the prefixes may read, at most.

    Where no attention backend asks for lengths on the CPU, the host keeps none under overlap, and what was reserved
    is the bound.
    """
    return batch.spec_info.nxt_kv_lens_cpu if batch.seq_lens_cpu is None else batch.seq_lens_cpu + extra


def upload(tensor_cpu: torch.Tensor, device: Any) -> torch.Tensor:
    """The tensor on `device`; through pinned memory where there is any, so that the copy does not wait."""
    if is_pin_memory_available(device):
        tensor_cpu = tensor_cpu.pin_memory()
    return tensor_cpu.to(device, non_blocking=True)


def reserve_lens(committed: torch.Tensor, allocated: torch.Tensor, reserve: int, page_size: int) -> torch.Tensor:
    """Slots each request must own before the step: committed + reserve in whole pages, never fewer than it owns.

    Args:
        committed, allocated: [B] int64 on the CPU.

    Returns:
        [B] int64.
    """
    pages = (committed + reserve + page_size - 1) // page_size
    return torch.maximum(allocated, pages * page_size)

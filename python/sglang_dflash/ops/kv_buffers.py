"""The KV buffers of all draft layers behind one table of addresses, so that one launch can write them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVBuffers:
    """Holds the buffers, so that their addresses stay good.

    Fields:
        k, v: per layer, [slots, Hkv, D], all of one shape, dtype and spacing of slots; a slot is contiguous.
        pointers: [2, L] int64 on the buffers' device; the addresses of `k`, then of `v`.
        slot_stride: elements from a slot to the next.
    """

    def __init__(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Raises ValueError where the buffers are not alike, or a slot is not contiguous: see `fits`."""
        if not fits(k, v):
            raise ValueError(f"KV buffers of {len(k)} and {len(v)} layers that are not all [slots, heads, dim] alike.")
        self.k, self.v = tuple(k), tuple(v)
        first = self.k[0]
        addresses = [[buffer.data_ptr() for buffer in buffers] for buffers in (self.k, self.v)]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=first.device)
        self.slot_stride = first.stride(0)

    def check(self, kv: torch.Tensor) -> None:
        """kv: [N, L, 2, Hkv, D]; asserts that its rows are what the buffers hold."""
        slot = self.k[0]
        assert kv.shape[1:] == (len(self.k), 2, *slot.shape[1:]), (kv.shape, len(self.k), slot.shape)
        assert kv.dtype == slot.dtype and kv.device == slot.device, (kv.dtype, slot.dtype, kv.device, slot.device)


def fits(k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> bool:
    """Whether `KVBuffers` can hold these: floating, [slots, heads, dim], all alike, each slot contiguous, each buffer
    aligned to 16 bytes."""
    if not k or len(k) != len(v):
        return False
    first = k[0]
    alike = all(
        (b.shape, b.stride(), b.dtype, b.device) == (first.shape, first.stride(), first.dtype, first.device)
        for b in (*k, *v)
    )
    aligned = all(buffer.data_ptr() % 16 == 0 for buffer in (*k, *v))
    wide = first.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return alike and aligned and wide and first.dim() == 3 and first.stride()[1:] == (first.shape[2], 1)

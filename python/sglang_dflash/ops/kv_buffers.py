"""The KV buffers of all draft layers and a table of their addresses, so that one kernel launch can write them all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FP8 = torch.float8_e4m3fn


class KVBuffers:
    """The buffers and their addresses. Holding the buffers keeps the addresses valid.

    Fields:
        k, v: per layer, [slots, Hkv, D]. All have the same shape, strides and dtype, and each slot is contiguous.
        pointers: [2, L] int64 on the buffers' device; the addresses of `k`, then of `v`.
        slot_stride: elements from one slot to the next.
    """

    def __init__(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Raises ValueError if the buffers do not fit, see `fits`."""
        if not fits(k, v):
            raise ValueError(
                f"The KV buffers of {len(k)} key and {len(v)} value layers do not fit one table: all must be "
                "[slots, heads, dim] with the same shape, strides, dtype and device."
            )
        self.k, self.v = tuple(k), tuple(v)
        first = self.k[0]
        addresses = [[buffer.data_ptr() for buffer in buffers] for buffers in (self.k, self.v)]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=first.device)
        self.slot_stride = first.stride(0)

    def check(self, kv: torch.Tensor) -> None:
        """Asserts that the rows of `kv` ([N, L, 2, Hkv, D]) have the buffers' layers, shape, dtype and device.
        Buffers in FP8 take rows of any dtype."""
        slot = self.k[0]
        assert kv.shape[1:] == (len(self.k), 2, *slot.shape[1:]), (kv.shape, len(self.k), slot.shape)
        same = kv.dtype == slot.dtype or slot.dtype == FP8
        assert same and kv.device == slot.device, (kv.dtype, slot.dtype, kv.device, slot.device)


def fits(k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> bool:
    """Whether `KVBuffers` can hold these.

    They must be [slots, heads, dim] in float32, bfloat16, float16 or FP8 (e4m3fn), and have the same shape, strides,
    dtype and device. Each slot must be contiguous, and each buffer aligned to 16 bytes.
    """
    if not k or len(k) != len(v):
        return False
    first = k[0]
    alike = all(
        (b.shape, b.stride(), b.dtype, b.device) == (first.shape, first.stride(), first.dtype, first.device)
        for b in (*k, *v)
    )
    aligned = all(buffer.data_ptr() % 16 == 0 for buffer in (*k, *v))
    known = first.dtype in (torch.float32, torch.bfloat16, torch.float16, FP8)
    return alike and aligned and known and first.dim() == 3 and first.stride()[1:] == (first.shape[2], 1)

"""Which buffers one launch can write, and that `project_context` plus `write_context_kv` equal `context_kv`."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.ops import FP8, KVBuffers, context_kv, fits, project_context
from sglang_dflash.ops.reference import write_context_kv


def _layers(*shape: int, dtype: torch.dtype = torch.bfloat16, count: int = 2) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize(
    ("k", "v", "expected"),
    [
        (_layers(4, 2, 8), _layers(4, 2, 8), True),
        ([], [], False),
        (_layers(4, 2, 8), _layers(4, 2, 8, count=1), False),
        (_layers(4, 2, 8), _layers(4, 2, 6), False),
        (_layers(4, 2, 8), _layers(4, 2, 8, dtype=torch.float32), False),
        (_layers(4, 2, 8, dtype=torch.float8_e5m2), _layers(4, 2, 8, dtype=torch.float8_e5m2), False),
        (_layers(4, 2, 8, dtype=FP8), _layers(4, 2, 8, dtype=FP8), True),
        (_layers(4, 2, 8, dtype=torch.uint8), _layers(4, 2, 8, dtype=torch.uint8), False),
        (_layers(2, 2, 2, 8), _layers(2, 2, 2, 8), False),
        ([b.transpose(0, 1) for b in _layers(2, 4, 8)], [b.transpose(0, 1) for b in _layers(2, 4, 8)], False),
    ],
    ids=["plain", "none", "counts", "value dim", "dtypes", "e5m2", "e4m3fn", "packed", "pages", "heads first"],
)
def test_only_plain_buffers_fit(k, v, expected):
    """Fails where buffers that need the host's writer are accepted, or plain ones are refused."""
    assert fits(k, v) is expected
    if not expected:
        with pytest.raises(ValueError, match="KV buffers"):
            KVBuffers(k, v)


def test_projected_then_written_is_context_kv():
    """Fails where the two steps together differ from `context_kv`, or write another slot."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(5, 12, generator=generator)
    weight = torch.randn(2, 2, 3, 8, 12, generator=generator)
    bias = torch.randn(2, 2, 3, 8, generator=generator)
    norm = torch.rand(2, 8, generator=generator)
    positions = torch.tensor([3, 4, 5, 0, 1])
    cos_sin = torch.randn(6, 8, generator=generator)
    slots = torch.tensor([7, 2, 0, 9, 4])
    buffers = KVBuffers(_layers(10, 3, 8, dtype=torch.float32), _layers(10, 3, 8, dtype=torch.float32))
    write_context_kv(project_context(features, weight, bias), norm, 1e-6, positions, cos_sin, slots, buffers)
    k, v = context_kv(features, weight, bias, norm, 1e-6, positions, cos_sin)
    for layer in range(2):
        assert torch.equal(buffers.k[layer][slots], k[layer])
        assert torch.equal(buffers.v[layer][slots], v[layer])
        others = [slot for slot in range(10) if slot not in slots.tolist()]
        assert not buffers.k[layer][others].any() and not buffers.v[layer][others].any()

"""How context KV reaches the draft's pool: one write for all layers, or layer by layer, with the same values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from stand_in_worker import attention_of, pool_of

from sglang_dflash import ops
from sglang_dflash.host.worker.context_kv import ContextKVWriter

LAYERS, HEADS, DIM, HIDDEN, SLOTS = 2, 2, 8, 12, 30


def _draft_model() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    rotary = SimpleNamespace(is_neox_style=True, cos_sin_cache=torch.randn(50, DIM, generator=generator))

    def attention() -> SimpleNamespace:
        weight = torch.randn(3 * HEADS * DIM, HIDDEN, generator=generator)
        return attention_of(weight, torch.rand(DIM, generator=generator), rotary, HEADS)

    layers = [SimpleNamespace(self_attn=attention()) for _ in range(LAYERS)]
    return SimpleNamespace(layers=layers, project_target_hidden=lambda hidden: hidden)


def test_both_ways_write_the_same():
    """Fails where one write for all layers writes other values or slots than a write per layer."""
    model = _draft_model()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, HIDDEN, generator=generator)
    positions, slots = torch.arange(7) + 20, torch.randperm(SLOTS, generator=generator)[:7]
    by_layer, at_once = pool_of(model, SLOTS), pool_of(model, SLOTS)
    writer = ContextKVWriter(model)
    writer.write(by_layer, hidden, positions, slots)
    writer._buffers, writer._kernels = ops.KVBuffers(at_once.k_buffer, at_once.v_buffer), ops.TORCH_KERNELS
    writer.write(at_once, hidden, positions, slots)
    for got, expected in zip(at_once.k_buffer + at_once.v_buffer, by_layer.k_buffer + by_layer.v_buffer, strict=True):
        assert expected.any() and torch.equal(got, expected)


class _Quantised(MHATokenToKVPool):
    """A pool with its own kind of write."""


@pytest.mark.parametrize(("kind", "layout"), [(MHATokenToKVPool, "hnd"), (_Quantised, "nhd")], ids=str)
def test_the_host_writes_where_the_pool_is_not_plain(kind, layout):
    """Fails where a pool of another layout or class is not written by the host."""
    model = _draft_model()
    writer = ContextKVWriter(model)
    writer.bind(pool_of(model, SLOTS, kind=kind, layout=layout))
    assert writer._buffers is None

"""The copies between a KV pool and its pool of host memory."""

from __future__ import annotations

import pytest
import torch

from sglang_cpu.host_pools import (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer_direct_pf_lf,
)

LAYERS, SHAPE = 3, (2, 8)
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def pools(slots: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Keys and values of all layers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(slots, *SHAPE, generator=generator) for _ in range(2 * LAYERS)]
    return [one.to(dtype) for one in drawn]


def whole_pages(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_come_back_to_other_slots(page_size: int, dtype: torch.dtype) -> None:
    """Fails where a row comes back from pools of whole pages in another layer or place, in other bits, or where a slot
    that was not named changes."""
    device, back = pools(10 * page_size, dtype, 1), pools(10 * page_size, dtype, 2)
    before = [one.clone() for one in back]
    host = [torch.zeros(7, LAYERS, page_size, *SHAPE, dtype=dtype) for _ in range(2)]
    written, held, read = (whole_pages(pages, page_size) for pages in ([3, 9, 1], [6, 0, 2], [4, 5, 8]))
    transfer_kv_all_layer_direct_lf_pf(device, host, written, held, page_size)
    for layer in range(LAYERS):
        places = [back[layer], back[LAYERS + layer]]
        transfer_kv_per_layer_direct_pf_lf(host, places, held, read, layer, page_size)
    others = torch.ones(10 * page_size, dtype=torch.bool)
    others[read] = False
    for given, got, was in zip(device, back, before, strict=True):
        assert same(got[read], given[written])
        assert same(got[others], was[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_back_layer_by_layer(dtype: torch.dtype) -> None:
    """Fails as the test above, with pools of the same form on both sides."""
    device, host, back = (pools(12, dtype, seed) for seed in (1, 2, 3))
    written, held, read = torch.tensor([7, 3, 4]), torch.tensor([0, 11, 5]), torch.tensor([9, 2, 6])
    transfer_kv_direct(device, host, written, held, 1)
    transfer_kv_direct(host, back, held, read, 1)
    assert all(same(got[read], given[written]) for given, got in zip(device, back, strict=True))


def test_nothing_is_copied_for_no_slot() -> None:
    """Fails where an empty list of slots raises or writes."""
    device, back = pools(4, torch.float32, 1), pools(4, torch.float32, 2)
    before = [one.clone() for one in back]
    none = torch.empty(0, dtype=torch.int64)
    transfer_kv_direct(device, back, none, none, 1)
    assert all(same(one, other) for one, other in zip(back, before, strict=True))

"""The block's layout in Triton, interpreted, bitwise against the reference."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.ops import reference, triton_block


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("batch", "block_size"), [(0, 4), (1, 1), (3, 2), (5, 7), (2, 16)])
def test_block_layout(batch, block_size, index_dtype):
    """Fails where an id, position or slot differs, or another request's row of the table is read."""
    generator = torch.Generator().manual_seed(block_size)
    table = torch.randperm(8 * 40, generator=generator).view(8, 40).int()
    bonus_ids = torch.randint(0, 2**31, (batch,), generator=generator)
    prefix_lens = torch.randint(0, 40 - block_size + 1, (batch,), generator=generator).to(index_dtype)
    rows = torch.randperm(8, generator=generator)[:batch].to(index_dtype)
    arguments = (bonus_ids, prefix_lens, rows, table, block_size, 151_669)
    for got, expected in zip(triton_block.block_layout(*arguments), reference.block_layout(*arguments), strict=True):
        assert got.dtype == expected.dtype == torch.int64
        assert got.shape == (batch, block_size)
        assert torch.equal(got, expected)


def test_the_last_positions_of_a_table():
    """Fails where lanes beyond the block read beyond the table."""
    table = torch.arange(2 * 12).view(2, 12).int()
    _, positions, slots = triton_block.block_layout(
        torch.tensor([1]), torch.tensor([5]), torch.tensor([1]), table, 7, 0
    )
    assert positions.tolist() == [list(range(5, 12))]
    assert slots.tolist() == [list(range(17, 24))]

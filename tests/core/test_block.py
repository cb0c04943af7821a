"""What is said of the rows to verify, of whole blocks and of some of their rows."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.core.block import Block, VerifyRows
from sglang_dflash.ops import keep_rows

K = 6


def _block(batch: int, width: int = K) -> tuple[Block, torch.Tensor]:
    """A block and ids in which no number occurs twice, so that any mix-up of rows or columns shows."""
    numbers = torch.arange(batch * width).view(batch, width)
    requests = torch.arange(batch)
    return Block(numbers + 1000, numbers + 2000, numbers + 3000, requests, requests + 50), numbers + 4000


def _ragged() -> VerifyRows:
    """Three requests with 5, 1 and 3 of 5 rows."""
    return VerifyRows.of(*_block(3, 5), keep_rows(torch.tensor([5, 1, 3]), 5, 9))


@pytest.mark.parametrize("width", range(1, K + 1))
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_whole_blocks(width, batch):
    """Fails where a row has the wrong id, position or slot, or stands at the wrong place."""
    block, ids = _block(batch, width)
    rows = VerifyRows.of(block, ids)
    assert (rows.width, rows.batch, rows.chosen) == (width, batch, None)
    assert torch.equal(rows.chains(), ids) and torch.equal(rows.ids, ids.flatten())
    assert torch.equal(rows.positions, block.positions.flatten()) and torch.equal(rows.slots, block.slots.flatten())
    assert torch.equal(rows.blocks(rows.positions), block.positions)
    assert rows.requests().tolist() == [request for request in range(batch) for _ in range(width)]
    assert all(map(torch.equal, rows.forward_rows(), (rows.ids, rows.positions, rows.slots)))


def test_some_rows():
    """Fails where a row that is not verified passes for one, or a verified row for another."""
    rows, (block, ids) = _ragged(), _block(3, 5)
    assert (rows.width, rows.batch, rows.chosen.lens.tolist()) == (5, 3, [5, 1, 3])
    kept = [(request, row) for request, count in enumerate([5, 1, 3]) for row in range(count)]
    for name, whole in (("ids", ids), ("positions", block.positions), ("slots", block.slots)):
        assert getattr(rows, name).tolist() == [int(whole[place]) for place in kept]
    assert rows.requests().tolist() == [request for request, _ in kept]
    for request, count in enumerate([5, 1, 3]):
        assert rows.chains()[request].tolist() == [*ids[request, :count].tolist(), *[-1] * (5 - count)]
        anchors = [int(ids[request, 0])] * (5 - count)
        assert rows.blocks(rows.ids)[request].tolist() == [*ids[request, :count].tolist(), *anchors]


def test_rows_of_a_larger_forward():
    """Fails where padding has an id, a position or a slot."""
    rows = VerifyRows.of(*_block(3, 5), keep_rows(torch.tensor([2, 1, 1]), 5, 4, 8))
    for padded, own in zip(rows.forward_rows(), (rows.ids, rows.positions, rows.slots), strict=True):
        assert padded.tolist() == [*own.tolist(), 0, 0, 0, 0]


def test_drafts_leave_the_block_alone():
    """Fails where the drafts are written into the block."""
    block, ids = _block(2)
    before = block.ids.clone()
    VerifyRows.of(block, ids.clone()).ids.fill_(-1)
    assert torch.equal(block.ids, before)


@pytest.mark.parametrize("width", [1, 4])
def test_each_row_has_its_request(width):
    """Fails where a row gets another request's sampling parameters, on the device or on the CPU."""
    for rows, lens in ((VerifyRows.of(*_block(3, width)), [width] * 3), (_ragged(), [5, 1, 3])):
        owners = [request for request, count in enumerate(lens) for _ in range(count)]
        assert rows.requests().tolist() == rows.requests_on_cpu() == owners


def test_an_empty_batch_has_no_rows():
    """Fails where a batch without requests has rows, or divides by nothing."""
    rows = VerifyRows.of(*_block(0, 3))
    assert rows.requests().tolist() == rows.requests_on_cpu() == rows.chains().flatten().tolist() == []

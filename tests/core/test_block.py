"""What a plan says of its rows, of whole blocks and of some of their rows."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.core.block import Block, VerifyPlan
from sglang_dflash.ops import keep_rows

K = 6


def _block(batch: int, width: int = K) -> tuple[Block, torch.Tensor]:
    """A block and ids in which no number occurs twice, so that any mix-up of rows or columns shows."""
    numbers = torch.arange(batch * width).view(batch, width)
    requests = torch.arange(batch)
    return Block(numbers + 1000, numbers + 2000, numbers + 3000, requests, requests + 50), numbers + 4000


def _ragged() -> VerifyPlan:
    """Three requests with 5, 1 and 3 of 5 rows."""
    return VerifyPlan.of(*_block(3, 5), keep_rows(torch.tensor([5, 1, 3]), 5, 9))


@pytest.mark.parametrize("width", range(1, K + 1))
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_whole_blocks(width, batch):
    """Fails where a row of the plan has the wrong id, position or slot, or stands at the wrong place."""
    block, ids = _block(batch, width)
    plan = VerifyPlan.of(block, ids)
    assert (plan.width, plan.batch, plan.lens, plan.lens_on_host()) == (width, batch, None, [width] * batch)
    assert torch.equal(plan.chains(), ids) and torch.equal(plan.ids, ids.flatten())
    assert torch.equal(plan.positions, block.positions.flatten()) and torch.equal(plan.slots, block.slots.flatten())
    assert torch.equal(plan.blocks(plan.positions), block.positions)
    assert plan.requests().tolist() == [request for request in range(batch) for _ in range(width)]
    assert all(map(torch.equal, plan.forward_rows(), (plan.ids, plan.positions, plan.slots)))


def test_some_rows():
    """Fails where a row that is not verified passes for one, or a verified row for another."""
    plan, (block, ids) = _ragged(), _block(3, 5)
    assert (plan.width, plan.batch, plan.lens.tolist(), plan.lens_on_host()) == (5, 3, [5, 1, 3], [5, 1, 3])
    kept = [(request, row) for request, count in enumerate([5, 1, 3]) for row in range(count)]
    for name, whole in (("ids", ids), ("positions", block.positions), ("slots", block.slots)):
        assert getattr(plan, name).tolist() == [int(whole[place]) for place in kept]
    assert plan.requests().tolist() == [request for request, _ in kept]
    for request, count in enumerate([5, 1, 3]):
        assert plan.chains()[request].tolist() == [*ids[request, :count].tolist(), *[-1] * (5 - count)]
        anchors = [int(ids[request, 0])] * (5 - count)
        assert plan.blocks(plan.ids)[request].tolist() == [*ids[request, :count].tolist(), *anchors]


def test_rows_of_a_larger_forward():
    """Fails where padding has an id, a position or a slot."""
    plan = VerifyPlan.of(*_block(3, 5), keep_rows(torch.tensor([2, 1, 1]), 5, 4, 8))
    for rows, own in zip(plan.forward_rows(), (plan.ids, plan.positions, plan.slots), strict=True):
        assert rows.tolist() == [*own.tolist(), 0, 0, 0, 0]


def test_a_plan_leaves_the_block_alone():
    """Fails where the drafts are written into the block."""
    block, ids = _block(2)
    before = block.ids.clone()
    VerifyPlan.of(block, ids.clone()).ids.fill_(-1)
    assert torch.equal(block.ids, before)


@pytest.mark.parametrize("width", [1, 4])
def test_values_of_requests_are_repeated_for_their_rows(width):
    """Fails where a row gets another request's sampling parameters, as tensor or as list."""
    values = torch.tensor([[7, 70], [8, 80], [9, 90]])
    for plan, lens in ((VerifyPlan.of(*_block(3, width)), [width] * 3), (_ragged(), [5, 1, 3])):
        owners = [request for request, count in enumerate(lens) for _ in range(count)]
        assert plan.repeat(values).tolist() == values[owners].tolist()
        assert plan.repeat_list(["a", "b", "c"]) == ["abc"[owner] for owner in owners]
        with pytest.raises(ValueError, match="argument"):
            plan.repeat_list(["a", "b"])


def test_an_empty_batch_has_no_rows():
    """Fails where a plan without requests has rows, or divides by nothing."""
    plan = VerifyPlan.of(*_block(0, 3))
    assert plan.repeat(torch.empty(0, 2)).shape == (0, 2)
    assert plan.repeat_list([]) == plan.drafts() == []


def test_drafts_up_to_each_row():
    """Fails where a row's own draft, or an earlier one, is missing: a grammar or a penalty must see them in order."""
    block, ids = _block(2, 4)
    for chain, drafts in zip(VerifyPlan.of(block, ids).drafts(), ids[:, 1:].tolist(), strict=True):
        assert chain == [[], drafts[:1], drafts[:2], drafts[:3]]
    assert VerifyPlan.of(*_block(2, 1)).drafts() == [[[]], [[]]]
    ragged = _ragged().drafts()
    assert [len(rows) for rows in ragged] == [5, 1, 3] and ragged[2] == [[], [4011], [4011, 4012]]


def test_blocks_of_some_requests():
    """Fails where a request gets another one's block."""
    block, _ = _block(3)
    some = block.of(torch.tensor([2, 0]))
    assert some.ids.tolist() == block.ids[[2, 0]].tolist() and some.req_pool_indices.tolist() == [52, 50]

"""The plan of a chain, the rows that the target verifies."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.core.block import Block, plan_chain

K = 6


def _block(batch: int) -> tuple[Block, torch.Tensor]:
    """A block and drafts in which no number occurs twice, so that any mix-up of rows or columns shows."""
    numbers = torch.arange(batch * K).view(batch, K)
    block = Block(ids=numbers + 1000, positions=numbers + 2000, slots=numbers + 3000, prefix_lens=torch.arange(batch))
    return block, torch.arange(batch * (K - 1)).view(batch, K - 1) + 4000


@pytest.mark.parametrize("width", range(1, K + 1))
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_chain_is_the_anchor_and_the_first_drafts(width, batch):
    """Fails where a row of the plan has the wrong id, position or slot."""
    block, draft_ids = _block(batch)
    plan = plan_chain(block, draft_ids, width)
    assert block.block_size == K
    assert plan.width == width
    for name in ("ids", "positions", "slots"):
        assert getattr(plan, name).shape == (batch, width)
        assert getattr(plan, name).dtype == torch.int64
    for row in range(batch):
        assert plan.ids[row].tolist() == [int(block.ids[row, 0]), *draft_ids[row, : width - 1].tolist()]
        assert plan.positions[row].tolist() == block.positions[row, :width].tolist()
        assert plan.slots[row].tolist() == block.slots[row, :width].tolist()


@pytest.mark.parametrize("width", [0, K + 1])
def test_width_outside_the_block_is_refused(width):
    """Fails where a width of 0, or beyond the block, gives a plan."""
    with pytest.raises(AssertionError, match=str(width)):
        plan_chain(*_block(2), width)


def test_planning_leaves_the_block_alone():
    """Fails where the drafts are written into the block, whose mask rows narrower plans still need."""
    block, draft_ids = _block(2)
    before = block.ids.clone()
    plan_chain(block, draft_ids, K).ids.fill_(-1)
    assert torch.equal(block.ids, before)

"""The plan of chains, and what a plan says of its rows, as chains or trees."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.core.block import Block, VerifyPlan, plan_chain
from sglang_dflash.ops import PlannedRows, Trees, choose_kernels

K = 6


def _block(batch: int, width: int = K) -> tuple[Block, torch.Tensor]:
    """A block and drafts in which no number occurs twice, so that any mix-up of rows or columns shows."""
    numbers = torch.arange(batch * width).view(batch, width)
    requests = torch.arange(batch)
    block = Block(numbers + 1000, numbers + 2000, numbers + 3000, prefix_lens=requests, req_pool_indices=requests + 50)
    return block, torch.arange(batch * (width - 1)).view(batch, width - 1) + 4000


@pytest.mark.parametrize("width", range(1, K + 1))
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_chain_is_the_anchor_and_its_drafts(width, batch):
    """Fails where a row of the plan has the wrong id, position or slot, or stands at the wrong place."""
    block, draft_ids = _block(batch, width)
    plan = plan_chain(block, draft_ids)
    assert block.drafted_width == width
    assert (plan.verify_width, plan.batch, plan.lens, plan.trees) == (width, batch, [width] * batch, None)
    for name in ("ids", "positions", "slots"):
        assert getattr(plan, name).shape == (batch * width,)
        assert getattr(plan, name).dtype == torch.int64
    assert plan.chains().shape == (batch, width)
    for row in range(batch):
        own = slice(row * width, (row + 1) * width)
        assert plan.ids[own].tolist() == [int(block.ids[row, 0]), *draft_ids[row].tolist()]
        assert plan.chains()[row].tolist() == plan.ids[own].tolist()
        assert plan.positions[own].tolist() == block.positions[row].tolist()
        assert plan.slots[own].tolist() == block.slots[row].tolist()


@pytest.mark.parametrize("width", [1, K - 1, K + 1])
def test_drafts_of_another_width_are_refused(width):
    """Fails where drafts that are fewer or more than the block's rows give a plan."""
    with pytest.raises(AssertionError, match=str(width - 1)):
        plan_chain(_block(2)[0], _block(2, width)[1])


def test_planning_leaves_the_block_alone():
    """Fails where the drafts are written into the block."""
    block, draft_ids = _block(2)
    before = block.ids.clone(), block.positions.clone(), block.slots.clone(), draft_ids.clone()
    plan = plan_chain(block, draft_ids)
    plan.ids.fill_(-1)
    assert all(map(torch.equal, before, (block.ids, block.positions, block.slots, draft_ids)))


def _trees() -> PlannedRows:
    """Three requests: a tree of five rows, an anchor alone, and a chain of three rows.

    The tree: row 1 and 2 behind the anchor, row 3 behind row 1, row 4 behind row 2.
    """
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 3]], dtype=torch.int32)
    depths = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 2, 3, 4]], dtype=torch.int32)
    ranks = torch.tensor([[-1, 0, 1, 0, 0], [-1, 0, 0, 0, 0]], dtype=torch.int32)
    return choose_kernels("cpu").plans.take_rows(Trees(parents, depths, ranks, torch.ones(2, 5)), [0, 2], [5, 3], 3)


def _tree_plan() -> VerifyPlan:
    numbers = torch.arange(9)
    return VerifyPlan(numbers + 1000, numbers + 2000, numbers + 3000, 5, _trees())


def test_trees_say_whose_rows_are_whose():
    """Fails where the rows of a plan with trees are counted or handed out as if all requests had the same."""
    plan = _tree_plan()
    assert plan.trees is not None and plan.trees.row_mask is not None
    assert (plan.batch, plan.lens, plan.verify_width) == (3, [5, 1, 3], 5)
    with pytest.raises(AssertionError):
        plan.chains()


@pytest.mark.parametrize("width", [1, 4])
def test_values_of_requests_are_repeated_for_their_rows(width):
    """Fails where a row gets another request's sampling parameters, as tensor or as list."""
    chains, values = plan_chain(*_block(3, width)), torch.tensor([[7, 70], [8, 80], [9, 90]])
    for plan, lens in ((chains, [width] * 3), (_tree_plan(), [5, 1, 3])):
        owners = [request for request, count in enumerate(lens) for _ in range(count)]
        assert plan.repeat(values).tolist() == values[owners].tolist()
        assert plan.repeat(values[:, 0]).tolist() == values[owners, 0].tolist()
        assert plan.repeat_list(["a", "b", "c"]) == ["abc"[owner] for owner in owners]
        with pytest.raises(ValueError, match="argument"):
            plan.repeat_list(["a", "b"])


def test_an_empty_batch_has_no_rows():
    """Fails where a plan without requests has rows, or divides by nothing."""
    plan = plan_chain(*_block(0, 3))
    assert plan.repeat(torch.empty(0, 2)).shape == (0, 2)
    assert plan.repeat_list([]) == plan.drafts() == []


def test_drafts_on_the_way_to_each_row_of_a_chain():
    """Fails where a row's own draft, or an earlier one, is missing: a grammar or a penalty must see them in order."""
    block, draft_ids = _block(2, 4)
    for chain, drafts in zip(plan_chain(block, draft_ids).drafts(), draft_ids.tolist(), strict=True):
        assert chain == [[], drafts[:1], drafts[:2], drafts[:3]]
    assert plan_chain(*_block(2, 1)).drafts() == [[[]], [[]]]


def test_drafts_on_the_way_to_each_row_of_a_tree():
    """Fails where a row counts the drafts of a sibling's branch, of another request, or an anchor."""
    assert _tree_plan().drafts() == [
        [[], [1001], [1002], [1001, 1003], [1002, 1004]],
        [[]],
        [[], [1007], [1007, 1008]],
    ]


def test_chains_of_one_length_say_the_same_as_trees():
    """Fails where the two forms of a plan of chains differ."""
    chains = plan_chain(*_block(3, 4))
    parents = torch.tensor([[-1, 0, 1, 2]] * 3, dtype=torch.int32)
    ranks = torch.tensor([[-1, 0, 0, 0]] * 3, dtype=torch.int32)
    rows = choose_kernels("cpu").plans.take_rows(
        Trees(parents, parents + 1, ranks, torch.ones(3, 4)), [0, 1, 2], [4] * 3, 3
    )
    trees = VerifyPlan(chains.ids, chains.positions, chains.slots, 4, rows)
    assert rows.row_mask is None
    assert (trees.batch, trees.lens, trees.drafts()) == (chains.batch, chains.lens, chains.drafts())
    values = torch.arange(3)
    assert torch.equal(trees.repeat(values), chains.repeat(values))
    assert trees.repeat_list("abc") == chains.repeat_list("abc")

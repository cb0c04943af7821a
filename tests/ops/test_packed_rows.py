"""Packing the likeliest rows of all blocks, against plain loops."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_dflash import ops

BATCH, BLOCK = 4, 6


def likeliest(reach: torch.Tensor, count: int) -> list[int]:
    """Rows of each block, row by row."""
    batch, depths = reach.shape
    rows = [(-float(reach[b, d]), d, b) for b in range(batch) for d in range(depths)]
    lens = [1] * batch
    for _, _, request in sorted(rows)[: count - batch]:
        lens[request] += 1
    return lens


@pytest.mark.parametrize("seed", range(8))
def test_the_likeliest_rows_are_packed(seed: int) -> None:
    """Fails where another row is taken than one of the best, where a tie does not go to the shallower row and then to
    the earlier request, or where a row's place or packed row is another's."""
    rng = random.Random(seed)
    ties = [1.0, 0.5, 0.25]
    chances = torch.tensor(
        [[rng.choice(ties) if seed % 2 else rng.random() for _ in range(BLOCK - 1)] for _ in range(BATCH)]
    )
    reach, count = chances.cumprod(1), rng.randint(BATCH, BATCH * BLOCK)
    packed = ops.likeliest_rows(reach, count, count + 3)
    assert packed.lens.tolist() == likeliest(reach, count) and packed.lens.dtype == torch.int32
    places = [b * BLOCK + i for b, length in enumerate(packed.lens.tolist()) for i in range(length)]
    assert packed.places is not None and packed.rows is not None and packed.places.tolist() == places
    padded = packed.padded()
    assert padded is not None and padded.tolist() == [*places, -1, -1, -1]
    values = torch.arange(BATCH * BLOCK) + 100
    assert ops.at_places(values, padded).tolist() == [*(100 + place for place in places), 0, 0, 0]
    for place, row in enumerate(packed.rows.tolist()):
        last = int(packed.lens[place // BLOCK]) - 1
        assert places[row] == place // BLOCK * BLOCK + min(place % BLOCK, last)


@pytest.mark.parametrize(("count", "lens"), [(BATCH, [1] * BATCH), (BATCH * BLOCK, [BLOCK] * BATCH)])
def test_no_row_and_every_row(count: int, lens: list[int]) -> None:
    assert ops.likeliest_rows(torch.full((BATCH, BLOCK - 1), 0.5), count, count).lens.tolist() == lens


def test_whole_blocks_are_not_packed() -> None:
    """Fails where a forward without padding gets its rows through a gather."""
    whole = ops.whole_blocks(BATCH, BLOCK, BATCH * BLOCK, "cpu")
    assert whole.places is None and whole.rows is None and whole.padded() is None
    padded = ops.whole_blocks(BATCH, BLOCK, BATCH * BLOCK + 2, "cpu")
    assert padded.places is not None and padded.places.tolist() == list(range(BATCH * BLOCK))


def test_chances_are_corrected_by_depth() -> None:
    """Fails where a chance does not follow from what its depth gave, rises along a chain, or exceeds 1."""
    totals = ops.ChanceTotals(torch.tensor([10.0, 10.0, 10.0]), torch.tensor([5.0, 10.0, 30.0]))
    reach = ops.chain_reach(torch.tensor([[0.8, 0.5, 0.9], [1.0, 1.0, 1.0]]).log(), totals, prior=0.0)
    torch.testing.assert_close(reach, torch.tensor([[0.4, 0.2, 0.2], [0.5, 0.5, 0.5]]))
    torch.testing.assert_close(ops.row_gains(reach), torch.tensor([0.5, 1.0, 1.5, 1.9, 2.1, 2.3]))


@pytest.mark.parametrize("seed", range(4))
def test_what_rows_gave_is_learned(seed: int) -> None:
    """Fails where a row counts that was not verified, or whose chain was wrong before it."""
    rng = random.Random(seed)
    log_probs = torch.tensor([[rng.random() for _ in range(BLOCK - 1)] for _ in range(BATCH)]).log()
    lens = [rng.randint(1, BLOCK) for _ in range(BATCH)]
    commits = [rng.randint(1, length) for length in lens]
    promised, accepted = [2.0] * (BLOCK - 1), [1.0] * (BLOCK - 1)
    for request, (length, commit) in enumerate(zip(lens, commits, strict=True)):
        for depth in range(1, min(length, commit + 1)):
            promised[depth - 1] += float(log_probs[request, depth - 1].exp())
            accepted[depth - 1] += depth < commit
    totals = ops.ChanceTotals(torch.full((BLOCK - 1,), 4.0), torch.full((BLOCK - 1,), 2.0))
    lens_, commits_ = (torch.tensor(values, dtype=torch.int32) for values in (lens, commits))
    ops.learn_chances(totals, log_probs, lens_, commits_, kept=0.5)
    torch.testing.assert_close(totals.promised, torch.tensor(promised))
    torch.testing.assert_close(totals.accepted, torch.tensor(accepted))

"""Which rows of all blocks are verified, against plain loops."""

from __future__ import annotations

import random

import pytest
import torch

from sglang_dflash import ops

BATCH, BLOCK = 4, 6


def likeliest(survival: torch.Tensor, count: int) -> list[int]:
    """Rows of each block, row by row."""
    batch, depths = survival.shape
    rows = [(-float(survival[b, d]), d, b) for b in range(batch) for d in range(depths)]
    lens = [1] * batch
    for _, _, request in sorted(rows)[: count - batch]:
        lens[request] += 1
    return lens


@pytest.mark.parametrize("seed", range(8))
def test_the_likeliest_rows_are_kept(seed: int) -> None:
    """Fails where another row is taken than one of the best, where a tie does not go to the shallower row and then to
    the earlier request, or where a row's place or verified row is another's."""
    rng = random.Random(seed)
    ties = [1.0, 0.5, 0.25]
    chances = torch.tensor(
        [[rng.choice(ties) if seed % 2 else rng.random() for _ in range(BLOCK - 1)] for _ in range(BATCH)]
    )
    survival, count = chances.cumprod(1), rng.randint(BATCH, BATCH * BLOCK)
    rows = ops.likeliest_rows(survival, count, count + 3)
    assert rows.lens.tolist() == likeliest(survival, count) and rows.lens.dtype == torch.int32
    places = [b * BLOCK + i for b, length in enumerate(rows.lens.tolist()) for i in range(length)]
    assert rows.kept.tolist() == places and rows.padded().tolist() == [*places, -1, -1, -1]
    for request, of_block in enumerate(rows.row_of.tolist()):
        for place, row in enumerate(of_block):
            own = place if place < int(rows.lens[request]) else 0
            assert places[row] == request * BLOCK + own


@pytest.mark.parametrize(("count", "lens"), [(BATCH, [1] * BATCH), (BATCH * BLOCK, [BLOCK] * BATCH)])
def test_no_row_and_every_row(count: int, lens: list[int]) -> None:
    assert ops.likeliest_rows(torch.full((BATCH, BLOCK - 1), 0.5), count, count).lens.tolist() == lens


def test_a_forward_without_padding() -> None:
    rows = ops.keep_rows(torch.tensor([2, 1, 3]), 3, 6)
    assert rows.size == 6 and rows.padded().tolist() == rows.kept.tolist() == [0, 1, 3, 6, 7, 8]


def test_survival() -> None:
    """Fails where an offset is not one of log-odds, a chance rises along a chain, or a draft without a chance, or one
    that is no number, spoils its block."""
    probs = torch.tensor([[0.5, 0.8, 1.0], [0.0, 0.9, float("nan")]])
    offsets = torch.tensor([[1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    survival = ops.survival(probs.log(), offsets)
    own = torch.tensor(0.5).logit().add(1.0).sigmoid()
    torch.testing.assert_close(survival[0, :2], torch.stack((own, own * 0.8)))
    assert survival.isfinite().all() and (survival.diff(dim=1) <= 0).all()
    assert 0 < survival[1, 0] < 1e-5 and survival[0, 2] > 0.99 * survival[0, 1]

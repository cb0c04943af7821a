"""Penalties in Triton, interpreted, against the torch body: counts and lengths bitwise, logits bitwise, too."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.ops.penalties import BlockRows, EmittedTokens, PenaltyParams
from sglang_dflash.ops.triton_penalties import SPAN, TritonEmittedTokens

MOST = 100


def make_params(count: int, vocab_size: int, generator: torch.Generator) -> PenaltyParams:
    frequency, presence = (torch.rand(2, count, generator=generator) * 4 - 2).unbind()
    return PenaltyParams(
        frequency,
        presence,
        torch.rand(count, generator=generator) + 0.5,
        torch.randint(0, 12, (count,), generator=generator),
        torch.randint(vocab_size, (count, 3), generator=generator),
    )


def started(rows: int, vocab_size: int, params: PenaltyParams, generator: torch.Generator) -> list[EmittedTokens]:
    """The torch body and the Triton body with the same tokens."""
    both = [body(vocab_size, "cpu") for body in (EmittedTokens, TritonEmittedTokens)]
    for row in range(rows):
        ids = torch.randint(min(vocab_size, 9), (row * 3,), generator=generator)
        for one in both:
            one.start(row, ids, float(params.frequency[row]))
    return both


def check_same(torch_body: EmittedTokens, triton_body: EmittedTokens, rows: torch.Tensor) -> None:
    for name, expected, got in zip(
        ("seen", "sums", "lens"), torch_body.of(rows, 0)[1:], triton_body.of(rows, 0)[1:], strict=True
    ):
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("width", [1, 2, 7, 16])
@pytest.mark.parametrize("vocab_size", [5, SPAN - 1, SPAN + 3])
def test_steps_of_a_batch(width, vocab_size):
    """Fails where a step penalises another logit, rounds otherwise, counts a token beyond the accepted ones, or counts
    equal ids of one block once."""
    generator = torch.Generator().manual_seed(width * vocab_size)
    batch, penalised = 5, 3
    params = make_params(penalised, vocab_size, generator)
    torch_body, triton_body = started(penalised, vocab_size, params, generator)
    requests, rows = torch.tensor([4, 0, 2]), torch.tensor([1, 2, 0])
    params = PenaltyParams(*(field[rows] for field in params))
    for _ in range(3):
        block_ids = torch.randint(min(vocab_size, 6), (batch, width), generator=generator)
        expected = torch.randn(batch, width, vocab_size, generator=generator) * 5
        got = expected.clone()
        block = BlockRows.whole(requests, block_ids[requests])
        for counts in (block.lens, torch.randint(1, width + 1, (penalised,), generator=generator)):
            trimmed = block._replace(lens=counts)
            torch_body.penalize(expected.view(-1, vocab_size), trimmed, rows, MOST, params)
            triton_body.penalize(got.view(-1, vocab_size), trimmed, rows, MOST, params)
            assert torch.equal(got, expected)
        lens = torch.randint(0, width + 1, (batch,), generator=generator, dtype=torch.int32)
        for one in (torch_body, triton_body):
            one.append(requests, rows, block_ids, lens, MOST, params)
        check_same(torch_body, triton_body, rows)


def test_special_values_and_neutral_parameters():
    """Fails where an infinity, a NaN or a zero's sign changes under neutral parameters, or a stop id is not masked."""
    generator = torch.Generator().manual_seed(0)
    neutral = PenaltyParams(
        torch.zeros(2), torch.zeros(2), torch.ones(2), torch.tensor([0, 9]), torch.tensor([[1, 1], [6, 2]])
    )
    bodies = started(2, 8, neutral, generator)
    logits = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1.0, -1.0, 3e38]).expand(2, 2, 8)
    made = []
    for body in bodies:
        made.append(logits.clone())
        ids = torch.tensor([[3, 4], [2, 0]])
        block = BlockRows.whole(torch.tensor([0, 1]), ids)
        body.penalize(made[-1].view(4, 8), block, torch.tensor([0, 1]), MOST, neutral)
    assert torch.equal(made[0].view(torch.int32), made[1].view(torch.int32))
    assert torch.equal(made[1][0].view(torch.int32), logits[0].contiguous().view(torch.int32))
    assert made[1][1, :, [2, 6]].isneginf().all()


@pytest.mark.parametrize("layout", ["a slice of a padded vocabulary", "columns first", "wider blocks"])
def test_strided_arguments(layout):
    """Fails where strided logits or ids are read as if they were dense, or a logit beyond the vocabulary changes."""
    generator = torch.Generator().manual_seed(1)
    params = make_params(1, 10, generator)
    bodies = started(1, 10, params, generator)
    own = torch.randn(6, 64, generator=generator) if layout != "columns first" else torch.randn(10, 6).T
    ids = torch.randint(10, (2, 8), generator=generator)[:, :3]
    made = []
    for body in bodies:
        wide = own.clone()
        block = BlockRows.whole(torch.tensor([1]), ids[1:])
        body.penalize(wide[:, :10], block, torch.tensor([0]), MOST, params)
        body.append(torch.tensor([1]), torch.tensor([0]), ids, torch.tensor([0, 2]), MOST, params)
        made.append(wide)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], own)
    check_same(*bodies, torch.tensor([0]))


def test_a_restarted_row_forgets():
    """Fails where `start` keeps a token of the row's former request, or a new row disturbs the others."""
    params = PenaltyParams(torch.ones(1), torch.ones(1), torch.ones(1), torch.zeros(1).long(), torch.zeros(1, 1).long())
    body = TritonEmittedTokens(6, "cpu")
    body.start(0, torch.tensor([3, 3]), 0.5)
    body.start(7, torch.tensor([1]), 1.0)
    assert body.of(torch.tensor([0, 7]), 0).sums.tolist() == [[0, 0, 0, 1.0, 0, 0], [0, 1.0, 0, 0, 0, 0]]
    body.start(0, torch.empty(0, dtype=torch.int64), 0.5)
    logits = torch.zeros(1, 1, 6)
    body.penalize(logits[0], BlockRows.whole(torch.tensor([0]), torch.tensor([[4]])), torch.tensor([0]), 0, params)
    assert not logits.any() and body.of(torch.tensor([0]), 0).lens.tolist() == [0]

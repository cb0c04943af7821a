"""Greedy acceptance in Triton, interpreted, bitwise against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch

from sglang_dflash.ops import reference, triton_acceptance

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def _same(got: reference.GreedyAcceptance, expected: reference.GreedyAcceptance) -> None:
    for name, a, b in zip(expected._fields, got, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert torch.equal(a, b), name


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("vocab", [1, 2, 1023, 1024, 1025, 7001])
def test_row_argmax(rows, vocab, dtype):
    """Fails where a split, a lane beyond the vocabulary or a tie (frequent in 16 bits) gives another id."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    got = triton_acceptance.row_argmax(logits)
    assert got.dtype == torch.int64
    assert torch.equal(got, reference.row_argmax(logits))


def test_the_lowest_of_equal_ids_wins_across_splits():
    """Fails where a later split, block or lane beats an earlier one with the same value."""
    logits = torch.full((6, 5000), -3.0)
    for row, places in enumerate([(0, 4999), (1023, 1024), (2047, 4096), (4998, 4999), (1, 2, 3), ()]):
        logits[row, list(places)] = 2.0
    assert triton_acceptance.row_argmax(logits).tolist() == [0, 1023, 2047, 4998, 1, 0]


def test_special_values():
    """Fails where infinities, both zeros or NaN are ordered differently than by torch's argmax."""
    inf, nan = float("inf"), float("nan")
    cases = torch.tensor(list(itertools.product([-inf, -0.0, 0.0, 1.0, inf, nan], repeat=3)))
    rows = torch.full((len(cases), 1500), -inf)
    rows[:, [5, 1030, 1499]] = cases
    assert torch.equal(triton_acceptance.row_argmax(rows), rows.argmax(-1))


def test_rows_of_a_wider_tensor():
    """Fails where the row stride is assumed to be the vocabulary size."""
    wide = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(triton_acceptance.row_argmax(wide[:, :1999]), wide[:, :1999].argmax(-1))


@pytest.mark.parametrize("width", [2, 3, 7, 16])
def test_accept_chain_of_every_length(width):
    """Fails where a block with its first wrong draft at a known place commits other ids."""
    generator = torch.Generator().manual_seed(width)
    target_ids = torch.randint(0, 2**31, (width + 2, width), generator=generator)
    ids = torch.cat((torch.full((width + 2, 1), 7), target_ids[:, :-1]), dim=1)
    for accept_len in range(width - 1):
        ids[accept_len, accept_len + 1] += 1  # later drafts stay right
    expected = reference.accept_chain(target_ids, ids)
    assert set(expected.commit_lens.tolist()) == set(range(1, width + 1))
    _same(triton_acceptance.accept_chain(target_ids, ids), expected)


def test_accept_chain_of_views():
    """Fails where the first columns of wider rows are read as if they were dense."""
    target_ids, ids = torch.randint(0, 2, (2, 9, 8), generator=torch.Generator().manual_seed(1))
    _same(
        triton_acceptance.accept_chain(target_ids[:, :5], ids[:, :5]),
        reference.accept_chain(target_ids[:, :5], ids[:, :5]),
    )


@DTYPES
@pytest.mark.parametrize(("batch", "width", "vocab"), [(0, 4, 50), (1, 2, 3), (5, 4, 3), (3, 16, 2500)])
def test_accept_greedy(batch, width, vocab, dtype):
    """Fails where the fused reduction and acceptance differ from argmax followed by acceptance."""
    generator = torch.Generator().manual_seed(batch)
    logits = torch.randn(batch, width, vocab, generator=generator).to(dtype)
    ids = torch.randint(0, vocab, (batch, width), generator=generator)
    ids[:, 1:] = torch.where(torch.rand(batch, width - 1, generator=generator) < 0.7, logits.argmax(-1)[:, :-1], 0)
    _same(triton_acceptance.accept_greedy(logits, ids), reference.accept_greedy(logits, ids))


def test_splits_cover_the_rows():
    """Fails where the number of splits is no power of two, or a split would have no columns."""
    for rows, vocab in itertools.product([1, 16, 100, 512, 1024, 5000], [1, 1024, 32000, 151936]):
        splits = triton_acceptance._splits_of(rows, vocab)
        assert splits & (splits - 1) == 0 and 1 <= splits <= max(1, -(-vocab // triton_acceptance.BLOCK))

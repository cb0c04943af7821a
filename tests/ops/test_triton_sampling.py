"""The draw of sampled rows in Triton, interpreted, against the reference, id by id."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.ops import MOST_SAMPLED, Filters, reference, triton_sampling

FILTERS = Filters(
    torch.tensor([1.0, 0.7, 1.5, 0.3, 1.0]),
    torch.tensor([20, 1, MOST_SAMPLED, 3, 5], dtype=torch.int32),
    torch.tensor([1.0, 0.9, 0.8, 0.5, 0.05]),
)


@pytest.fixture
def reread(monkeypatch) -> list[int]:
    """Narrow lanes, as the interpreter is slow; and how often a row was read again."""
    monkeypatch.setattr(triton_sampling, "BLOCK", 64)
    calls: list[int] = []
    original = triton_sampling._read_again

    def counted(*args):
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(triton_sampling, "_read_again", counted)
    return calls


def make_logits(rows: int, vocab: int, seed: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and a number for each row."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale, torch.rand(rows, generator=generator)


def check(logits: torch.Tensor, uniform: torch.Tensor, any_id: bool = False, filters: Filters = FILTERS) -> None:
    requests = torch.arange(len(logits)) % len(filters.top_ks)
    expected = reference.sample_rows(logits, requests, filters, uniform, any_id)
    got = triton_sampling.sample_rows(logits, requests, filters, uniform, any_id)
    assert got.dtype == torch.int64 and torch.equal(got, expected), (got.tolist(), expected.tolist())


def make_filters(top_k: int) -> Filters:
    """Of one request."""
    return Filters(torch.ones(1), torch.tensor([top_k], dtype=torch.int32), torch.ones(1))


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 300])
def test_rows(vocab, reread):
    """Fails where another token is kept or drawn than by the reference: fewer tokens than top_k, a last block of any
    size, five requests."""
    check(*make_logits(15, vocab, vocab))


def test_ties(reread):
    """Fails where ties of the last kept token are lost, wherever they are: rows with few values and of one value."""
    logits, uniform = make_logits(15, 300, 1)
    logits = (logits / 2).round()
    logits[10:] = 1.5
    check(logits, uniform)
    assert reread, "no lane dropped a kept token"


def test_a_lane_with_many_kept_tokens(reread):
    """Fails where the tokens that a lane dropped are missing: all good ones are in one lane, 64 columns apart."""
    logits, uniform = make_logits(10, 330, 2)
    logits[:, 7::64] += 20
    check(logits, uniform)
    assert reread


def test_the_row_is_read_for_what_lanes_dropped(reread):
    """Fails where tokens that lanes dropped are not counted: of the five best, four are in one lane, and a worse one of
    another lane takes the place of the fourth."""
    logits = torch.full((1, 330), -9.0)
    logits[0, 7::64] = torch.tensor([3.0, 2.9, 2.8, 2.7, 2.6, 2.5])
    logits[0, 20], logits[0, 30] = 2.65, 2.55
    check(logits.expand(8, -1), torch.arange(8) / 8 + 0.1, filters=make_filters(5))
    assert len(reread) == 8


def test_rows_are_seldom_read_again(reread):
    """Fails where rows whose kept tokens lie in different lanes are read again, among them those of grammars."""
    logits, uniform = make_logits(10, 200, 3)
    masked = torch.full_like(logits, -torch.inf)
    for row in range(10):
        masked[row, row : row + 50] = logits[row, row : row + 50]
    check(masked, uniform)
    assert not reread


@pytest.mark.parametrize("any_id", [False, True])
def test_rows_without_a_distribution(any_id, reread):
    """Fails where NaN, inf or a row of -inf gives another id than the reference, or a greedy row with them another
    argmax; also where huge logits overflow."""
    logits, uniform = make_logits(20, 70, 4)
    logits[:5, 66], logits[2, 3] = torch.nan, torch.nan
    logits[5:10, 9] = torch.inf
    logits[10:15] = -torch.inf
    logits[15:, :30] = -3.4e38
    logits[17:, 30:60] = 3.4e38
    check(logits, uniform, any_id)


def test_the_ends_of_the_random_numbers(reread):
    """Fails where the smallest or the largest number draws a token that is not kept."""
    logits, _ = make_logits(15, 150, 5)
    for number in (0.0, 1 - 2**-24):
        check(logits, torch.full((15,), number))


@pytest.mark.parametrize("seed", [5, 11, 14])
def test_sums_that_are_rounded_otherwise(seed, reread):
    """Fails where a row that is read again gets no token, because the sum of its weights and the last of the running
    sums differ by rounding."""
    logits, _ = make_logits(1, 200, seed, scale=1.0)
    check((logits * 8).round() / 4, torch.tensor([1 - 2**-24]), filters=make_filters(64))
    assert reread


def test_the_lanes_of_a_server_and_strided_rows():
    """Fails where the real number of lanes, or rows of a padded vocabulary, are read otherwise."""
    logits, uniform = make_logits(5, triton_sampling.BLOCK + 70, 6)
    check(logits[:, : triton_sampling.BLOCK + 7], uniform)


def test_no_rows():
    """Fails where an empty batch launches."""
    none = torch.zeros(0)
    ids = triton_sampling.sample_rows(torch.zeros(0, 9), none.long(), FILTERS, none, True)
    assert ids.shape == (0,) and ids.dtype == torch.int64

"""The draw of sampled rows: which tokens are kept against a computation token by token, and the shares of the draws.
`tests/host` compares with SGLang's sampler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.ops import MOST_SAMPLED, Filters
from sglang_dflash.ops.reference import kept_probabilities, sample_rows

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)
ROW = torch.zeros(1, dtype=torch.int64)


def make_filters(*asked: tuple[float, int, float]) -> Filters:
    """Of requests with a temperature, a top_k and a top_p each."""
    temperatures, top_ks, top_ps = zip(*asked, strict=True)
    return Filters(torch.tensor(temperatures), torch.tensor(top_ks, dtype=torch.int32), torch.tensor(top_ps))


def kept_by_hand(row: list[float], temperature: float, top_k: int, top_p: float) -> tuple[list[float], float]:
    """As flashinfer's kernel accepts a token: by its pivot's count and mass. In float64.

    Returns:
        The kept probabilities; and how near a token's mass comes to `top_p`.
    """
    probs = (torch.tensor(row).double() / temperature).softmax(0).tolist()
    kept, nearest = [], 1.0
    for mine in probs:
        likelier = [other for other in probs if other > mine]
        nearest = min(nearest, abs(sum(likelier) - top_p)) if top_p < 1 else nearest
        accepted = mine > 0 and len(likelier) < top_k and (sum(likelier) < top_p or top_p == 1)
        kept.append(mine if accepted else 0.0)
    return [share / sum(kept) for share in kept], nearest


def p_value(counts: torch.Tensor, shares: torch.Tensor) -> float:
    """Of Pearson's chi-square; 0 if a token without a share was drawn."""
    if counts[shares == 0].any():
        return 0.0
    expected = shares * counts.sum()
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    freedom = torch.tensor(max(1, int(often.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@EXAMPLES
@given(data=st.data())
def test_what_is_kept(data):
    """Fails where a token of equal ones is kept and another dropped, a likelier token is miscounted, a row takes the
    parameters of another request, or the shares are not renormalised."""
    vocab, count = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(4, vocab, generator=generator) * data.draw(st.sampled_from([0.1, 2.0, 8.0]))
    if data.draw(st.booleans()):
        logits = (logits * 2).round() / 2  # ties
    if vocab > 1:
        logits[0, torch.rand(vocab, generator=generator).argsort()[: data.draw(st.integers(0, vocab - 1))]] = -torch.inf
    asked = [
        (
            data.draw(st.floats(0.25, 4, width=32)),
            data.draw(st.integers(1, MOST_SAMPLED)),
            data.draw(st.sampled_from([1.0, 0.99, 0.8, 0.3, 1e-3])),
        )
        for _ in range(count)
    ]
    requests = torch.randint(count, (4,), generator=generator)
    got = kept_probabilities(logits, requests, make_filters(*asked))
    for row, request in enumerate(requests.tolist()):
        expected, nearest = kept_by_hand(logits[row].tolist(), *asked[request])
        if nearest > 1e-6:
            torch.testing.assert_close(got[row].double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-7)


def test_a_row_by_hand():
    """Fails where ties at the last place are split, the mass counts a token itself, or -inf is kept."""
    row = torch.tensor([[1.0, 2.0, 1.0, 0.0, 2.0, -torch.inf]])
    kept = [(kept_probabilities(row, ROW, make_filters((1.0, k, p)))[0] > 0).tolist() for k, p in ((3, 1.0), (2, 1.0))]
    assert kept == [[True, True, True, False, True, False], [False, True, False, False, True, False]]
    assert (kept_probabilities(row, ROW, make_filters((1.0, 64, 1.0)))[0] > 0).sum() == 5
    both = 2 * float(row.softmax(-1)[0, 1])  # of the two best together
    for top_p, count in ((both - 1e-3, 2), (both + 1e-3, 4)):
        assert (kept_probabilities(row, ROW, make_filters((1.0, 64, top_p)))[0] > 0).sum() == count


def test_evenly_spread_numbers_draw_the_shares():
    """Fails where the draw is not the inverse of the cumulated shares in the order of the ids."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 40, generator=generator) * 2
    for asked in ((1.0, 64, 1.0), (0.7, 9, 1.0), (1.3, 20, 0.9), (1.0, 1, 1.0)):
        filters, count = make_filters(asked), 8192
        uniform = torch.arange(count) / count
        ids = sample_rows(logits.expand(count, -1), ROW.expand(count), filters, uniform, False)
        assert ids.dtype == torch.int64 and (ids.diff() >= 0).all()
        shares = kept_probabilities(logits, ROW, filters)[0]
        assert (ids.bincount(minlength=40) - shares * count).abs().max() <= 1.01


@pytest.mark.parametrize("asked", [(1.0, 64, 1.0), (0.6, 20, 0.95), (1.5, 5, 0.7)])
def test_the_draw_is_fair(asked):
    """Fails where a token's share differs from its probability (chi-square), or one that is not kept is drawn."""
    generator = torch.Generator().manual_seed(20261130)
    logits, count = torch.randn(1, 200, generator=generator) * 2, 40_000
    shares = kept_probabilities(logits, ROW, make_filters(asked))[0].double()
    counts = torch.zeros(200, dtype=torch.int64)
    for _ in range(10):
        uniform = torch.rand(count // 10, generator=generator)
        rows = logits.expand(len(uniform), -1)
        ids = sample_rows(rows, ROW.expand(len(uniform)), make_filters(asked), uniform, False)
        counts += ids.bincount(minlength=200)
    assert p_value(counts, shares) > 1e-4


def flashinfers_draw(probs: list[float], top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One draw by rejection, as `TopKTopPSamplingFromProbKernel` of flashinfer 0.7.2 does it (`sampling.cuh`)."""
    low, high, mass = 0.0, 1.0, 1.0
    while True:
        target, below, drawn = float(torch.rand((), generator=generator).double()) * mass, 0.0, -1
        for token, share in enumerate(probs):
            if share > low:
                drawn, below = token, below + share
                if below > target:
                    break
        pivots = probs[drawn], (probs[drawn] + high) / 2
        counts, masses = zip(*((len(x), sum(x)) for x in ([y for y in probs if y > p] for p in pivots)), strict=True)
        if counts[0] < top_k and masses[0] < top_p:
            return drawn
        if counts[1] < top_k and masses[1] < top_p:
            low, high, mass = pivots[0], pivots[1], masses[0]
        else:
            low, mass = pivots[1], masses[1]


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (5, 0.6), (64, 0.75)])
def test_the_shares_are_those_of_flashinfers_rejections(top_k, top_p):
    """Fails where flashinfer's kernel, by its own steps, draws other tokens or in other shares; with ties at the last
    place that is kept."""
    generator = torch.Generator().manual_seed(7)
    logits, count = torch.tensor([[2.0, 0.5, 1.0, 1.0, 3.0, 1.0, -torch.inf, 0.5, 2.5, -1.0]]), 6000
    shares = kept_probabilities(logits, ROW, make_filters((1.3, top_k, top_p)))[0].double()
    probs = (logits[0].double() / 1.3).softmax(0).tolist()
    drawn = torch.tensor([flashinfers_draw(probs, top_k, top_p, generator) for _ in range(count)])
    assert p_value(drawn.bincount(minlength=10), shares) > 1e-4


def test_greedy_rows_and_rows_without_a_distribution():
    """Fails where a `top_k` of 1 is not the argmax with the lowest id of a tie, or a row with NaN or inf, or of -inf
    alone, raises or gets another id than 0, respectively any id."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).repeat(5, 1)
    logits[1, 3], logits[2, 2], logits[3] = torch.nan, torch.inf, -torch.inf
    uniform = torch.tensor([0.99, 0.99, 0.5, 0.25, 0.0])
    rows, requests = torch.zeros(5, dtype=torch.int64), make_filters((1.0, 4, 0.9))
    assert sample_rows(logits, rows, requests, uniform, False).tolist()[1:4] == [0, 0, 0]
    assert sample_rows(logits, rows, requests, uniform, True).tolist()[1:4] == [3, 2, 1]
    assert sample_rows(logits, rows, make_filters((0.5, 1, 0.1)), uniform, True).tolist() == [1, 3, 2, 0, 1]
    nobody = sample_rows(logits[:0], rows[:0], requests, uniform[:0], False)
    assert nobody.shape == (0,) and nobody.dtype == torch.int64

"""The best id of each row and its log-probability: the chosen body against the specification and float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash import ops
from sglang_dflash.ops import reference

KERNELS = ops.choose_kernels("cpu", torch.float32)
EPS = torch.finfo(torch.float32).eps
KINDS = ["normal", "ties", "zeros", "nan", "infinite", "minus-infinite"]


def make_logits(kind: str, rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """[rows, vocabulary] float32."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=random) * 4
    rare = torch.rand(logits.shape, generator=random) < 3 / vocabulary
    if kind == "ties":
        return logits.round()
    if kind == "zeros":
        return logits.sign() * 0.0  # zeros of both signs are equal
    if kind == "minus-infinite":
        return torch.full_like(logits, -torch.inf)
    return logits if kind == "normal" else torch.where(rare, torch.nan if kind == "nan" else torch.inf, logits)


def assert_near(got: ops.Drafts, logits: torch.Tensor) -> None:
    """Ids as in the specification; log-probabilities within twice its error against float64, plus some roundings."""
    expected = reference.best_log_probs(logits)
    assert got.ids.dtype == torch.int64 and got.log_probs.dtype == torch.float32
    assert torch.equal(got.ids, expected.ids)
    assert torch.equal(got.log_probs.isneginf(), expected.log_probs.isneginf())
    finite = ~expected.log_probs.isneginf()
    if not finite.any():
        return
    wide = torch.where(logits.isnan(), -torch.inf, logits.double())
    truth = wide.log_softmax(-1).gather(1, expected.ids[:, None])[:, 0][finite]
    largest = wide.gather(1, expected.ids[:, None])[:, 0][finite].abs().max() + truth.abs().max() + 2
    allowed = 2 * (expected.log_probs[finite] - truth).abs().max() + EPS * largest
    error = (got.log_probs[finite] - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"  # false for NaN


@settings(max_examples=200, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 7, 33, 300, 1025, 16384, 16385, 40000]),
    kind=st.sampled_from(KINDS),
    rows=st.integers(0, 6),
    more=st.sampled_from([0, 1, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_any_logits(vocabulary, kind, rows, more, dtype, seed):
    """Fails where the best id is missed, a tie goes to a higher id, NaN counts as more than -inf, a part of the
    vocabulary or its end is left out of the softmax, or padding behind it is read."""
    logits = make_logits(kind, rows, vocabulary, seed).to(dtype)
    wide = torch.full((rows, vocabulary + more), 1e9, dtype=dtype)
    wide[:, :vocabulary] = logits
    assert_near(KERNELS.best_log_probs(wide[:, :vocabulary]), logits)


@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4, 1e30])
def test_large_and_small_logits(scale):
    """Fails where an exponential overflows, or a sum of one part of the vocabulary is not scaled to another's maximum.
    The maxima rise from part to part, or fall."""
    rising = torch.linspace(-1, 1, 40000)[None] * scale
    for logits in (rising, rising.flip(1), rising.roll(20000, 1)):
        assert_near(KERNELS.best_log_probs(logits), logits)


@pytest.mark.parametrize("body", [reference.best_log_probs, KERNELS.best_log_probs], ids=["specification", "chosen"])
def test_by_hand(body):
    """Fails where a row without a finite maximum gives a NaN, or another id than the lowest."""
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[0.0, 0.0, -inf], [nan, -inf, -inf], [nan, 1.0, nan], [0.0, inf, inf]])
    ids, log_probs = body(rows)
    assert ids.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(log_probs, torch.tensor([-0.6931472, -inf, 0.0, -inf]))

"""Greedy acceptance over the native argmax, which sglang_cpu's library registers with torch, against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dflash.ops import TORCH_KERNELS, choose_kernels

NATIVE = choose_kernels("cpu", torch.float32)
pytestmark = pytest.mark.skipif(NATIVE is TORCH_KERNELS, reason="the native ops are not built")


def assert_accepts_alike(logits: torch.Tensor, ids: torch.Tensor) -> None:
    for got, expected in zip(NATIVE.accept_greedy(logits, ids), TORCH_KERNELS.accept_greedy(logits, ids), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    for rows in logits.unbind(1):  # rows of one position are a whole block apart
        assert torch.equal(NATIVE.row_argmax(rows), rows.argmax(-1))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_accept_greedy(data):
    """Fails where ties, NaN, infinities or any number of accepted drafts give other ids than torch's argmax."""
    batch, width = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 9))
    vocabulary = data.draw(st.sampled_from([1, 2, 7, 33, 64, 1000, 1025, 20000, 40000]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    values = data.draw(st.sampled_from(["normal", "ties", "zeros", "nan", "infinite", "minus-infinite"]))
    logits = torch.randn(batch, width, vocabulary, generator=random)
    if values == "ties":
        logits = logits.round()
    elif values == "zeros":
        logits = logits.sign() * 0.0  # zeros of both signs are equal
    elif values in ("nan", "infinite"):
        logits[torch.rand(logits.shape, generator=random) < 2 / vocabulary] = (
            torch.nan if values == "nan" else torch.inf
        )
    elif values == "minus-infinite":
        logits.fill_(-torch.inf)
    logits = logits.to(dtype)
    ids = torch.randint(vocabulary, (batch, width), generator=random)
    agree = torch.rand(batch, width, generator=random) < data.draw(st.sampled_from([0.0, 0.8, 1.0]))
    ids[:, 1:] = torch.where(agree, logits.argmax(-1), ids)[:, :-1]
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.sampled_from([1, 4])))
    assert_accepts_alike(logits, ids)
    torch.set_num_threads(before)


def test_accept_greedy_of_a_part_of_the_vocabulary():
    """Fails where logits with padding after the vocabulary are read as if they were dense."""
    logits = torch.randn(3, 4, 64)
    logits[..., 50:] = 9.0
    assert_accepts_alike(logits[..., :50], torch.randint(50, (3, 4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_get_torch(dtype):
    """Fails where a native body is chosen for tensors that it does not take."""
    assert choose_kernels("cpu", torch.float32, dtype) is TORCH_KERNELS

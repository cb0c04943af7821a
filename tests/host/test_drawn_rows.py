"""Sampled batches that the op `sample_rows` draws in the place of SGLang's sampler: which they are, and that SGLang's
functions keep the same tokens. `test_distribution.py` shows the distribution of their tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as host
from stand_ins import Batch, configured, make_req, make_row_sampler, make_rows, make_sampler, output_of

from sglang_dflash.host.worker.sampling import can_draw
from sglang_dflash.ops import Filters
from sglang_dflash.ops.reference import kept_probabilities

VOCAB = 300
TOP_K = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # as Qwen3 recommends


@pytest.fixture(autouse=True)
def _configured():
    with configured(sampling_backend="flashinfer"):
        yield


def batch_of(*asked: dict[str, Any], **fields: Any) -> Batch:
    return Batch([make_req(slot=i, vocab_size=VOCAB, **params) for i, params in enumerate(asked)], VOCAB, **fields)


@pytest.mark.parametrize(
    "asked",
    [
        [TOP_K],
        [TOP_K, {"temperature": 0.0}],
        [{"top_k": 64}, {"temperature": 1.3, "top_k": 2}],
        [{**TOP_K, "frequency_penalty": 0.5, "logit_bias": {"3": 2.0}}],
    ],
    ids=["top_k and top_p", "a greedy request beside", "the largest top_k", "penalties and a bias"],
)
def test_what_the_op_draws(asked):
    """Fails where a batch that the op serves goes to SGLang's sampler."""
    assert can_draw(batch_of(*asked), torch.zeros(1, VOCAB), make_sampler())


@pytest.mark.parametrize(
    "asked",
    [
        [TOP_K, {"temperature": 1.0}],
        [{"top_k": 65}],
        [TOP_K, {**TOP_K, "min_p": 0.1}],
        [{"temperature": 0.0, "frequency_penalty": 0.5}],
    ],
    ids=["the whole vocabulary", "too large a top_k", "min_p", "greedy"],
)
def test_what_sglang_samples(asked):
    """Fails where the op draws with filters that it does not have, or whose order is another with flashinfer."""
    assert not can_draw(batch_of(*asked), torch.zeros(1, VOCAB), make_sampler())


def test_what_else_keeps_sglangs_sampler():
    """Fails where logprobs, seeds, masks or processors would be lost, or other logits or samplers be taken."""
    logits, sampler = torch.zeros(2, VOCAB), make_sampler()
    batch = batch_of(TOP_K)
    assert not can_draw(batch_of(TOP_K, return_logprob=True), logits, sampler)
    assert not can_draw(batch, logits.bfloat16(), sampler)
    assert not can_draw(batch, torch.zeros(VOCAB, 2).T, sampler)
    assert not can_draw(batch, logits, SimpleNamespace())
    for name in ("sampling_seed", "sampling_mask_batch_indices", "has_custom_logit_processor"):
        batch = batch_of(TOP_K)
        setattr(batch.sampling_info, name, torch.ones(1))
        assert not can_draw(batch, logits, sampler), name
    with configured(sampling_backend="pytorch"):
        assert not can_draw(batch_of(TOP_K), logits, sampler)


def test_sglangs_own_filter_keeps_the_same():
    """Fails where a token's probability differs from that of SGLang's torch filter, on rows without ties, which that
    filter splits."""
    torch.manual_seed(0)
    asked = [(0.6, 20, 0.95), (1.0, 64, 1.0), (1.4, 7, 0.5), (1.0, 64, 0.8), (0.3, 2, 0.99), (1.0, 1, 0.3)]
    temperatures, top_ks, top_ps = (torch.tensor(values) for values in zip(*asked, strict=True))
    rows = 40
    logits = torch.randn(rows * len(asked), VOCAB) * 3
    logits[::5, 10:] = -torch.inf  # fewer tokens than most top_ks
    requests = torch.arange(len(asked)).repeat(rows)
    probs = (logits / temperatures[requests, None]).softmax(-1)
    _, weights, ids, _ = host.top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        top_ks[requests],
        top_ps[requests],
        torch.zeros(len(requests)),
        need_min_p_sampling=False,
        sampling_seed=None,
        positions=requests,
        return_filtered_probs=True,
    )
    expected = torch.zeros_like(probs).scatter(1, ids.long(), weights / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(kept_probabilities(logits, requests, Filters(temperatures, top_ks, top_ps)), expected)


def test_sglangs_joint_support_is_the_same(monkeypatch):
    """Fails where SGLang, by what it says of flashinfer's kernel when it captures the support, keeps other tokens; rows
    have many ties. The two kernels that it composes are written here in torch: both keep ties."""
    torch.manual_seed(1)

    def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [row * (row >= row.sort(descending=True)[0][k - 1]) for row, k in zip(probs, top_ks.tolist(), strict=True)]
        )

    def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
        above = torch.stack([torch.stack([row[row > x].sum() for x in row]) for row in probs])
        return probs * (above < top_ps[:, None])

    monkeypatch.setattr(host, "top_k_renorm_prob", top_k_renorm, raising=False)
    monkeypatch.setattr(host, "top_p_renorm_prob", top_p_renorm, raising=False)

    def draw(probs: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        assert options == {"filter_apply_order": "joint"}
        return probs.argmax(-1).int()

    monkeypatch.setattr(host, "top_k_top_p_sampling_from_probs", draw, raising=False)
    asked = [TOP_K, {"temperature": 1.5, "top_k": 6, "top_p": 0.7}, {"top_k": 30}]
    info = batch_of(*asked).sampling_info
    info.sampling_mask_batch_indices = torch.arange(3)
    logits = (torch.randn(3, VOCAB) * 3).round() / 2
    probs = (logits / info.temperatures).softmax(-1)
    _, capture = make_sampler()._sample_from_probs(probs, info, torch.zeros(3), False)
    kept = kept_probabilities(logits, torch.arange(3), Filters(info.temperatures.flatten(), info.top_ks, info.top_ps))
    assert (kept > 0).equal(capture.weights > 0)
    assert ((kept > 0).sum(1) > info.top_ks).any(), "no tie at the last place"


def test_a_row_without_a_token_beside_a_grammar(monkeypatch):
    """Fails where such a row always gets id 0, which may be the end that the grammar forbids; without a grammar
    flashinfer gives id 0."""
    ids = torch.zeros(1, 64, dtype=torch.int64)
    sampler, batch = make_row_sampler(make_sampler(), VOCAB, 64), batch_of(TOP_K)
    for grammars, distinct in (([object()], True), (None, False)):
        batch.sampling_info.grammars = grammars
        logits = torch.full((64, VOCAB), -torch.inf)
        chosen, _ = sampler.choose(batch, make_rows(ids), output_of(logits), None, None)
        assert chosen.shape == (64,) and (len(chosen.unique()) > 1) == distinct

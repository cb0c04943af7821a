"""SGLang's sampler with our hooks on mixed batches: a request's token does not depend on the other requests."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as host
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_cpu.deterministic import sample_uncompiled
from sglang_cpu.ops import murmur_hash32
from sglang_dflash.host.patches.sampler import sample_as_if_alone, seeded_min_p

VOCABULARY = 400
FILTER = host.top_k_top_p_min_p_sampling_from_probs_torch
MULTINOMIAL = host.multinomial_with_seed

# (top_k, top_p, min_p); a greedy request is top_k 1, whatever else it asks for.
KINDS = [
    *[(TOP_K_ALL, 1.0, 0.0), (1, 1.0, 0.0), (TOP_K_ALL, 0.7, 0.0), (20, 1.0, 0.0), (TOP_K_ALL, 1.0, 0.1)],
    *[(30, 0.9, 0.05), (1, 0.5, 0.3), (TOP_K_ALL, 1.0, 0.0)],
]


@pytest.fixture(autouse=True)
def _hooked(monkeypatch):
    """The host's sampler on a CPU, as our hooks leave it."""
    torch.manual_seed(0)
    monkeypatch.setattr(host, "get_exec", lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch")))
    monkeypatch.setattr(host, "murmur_hash32", murmur_hash32)
    monkeypatch.setattr(host, "multinomial_with_seed", partial(sample_uncompiled, MULTINOMIAL))
    monkeypatch.setattr(host, "top_k_top_p_min_p_sampling_from_probs_torch", partial(seeded_min_p, FILTER))


def info_of(kinds: list[tuple[int, float, float]], seeds: list[int] | None, **fields: Any) -> SimpleNamespace:
    """A batch's `SamplingBatchInfo`, as far as the sampler reads it."""
    top_ks, top_ps, min_ps = zip(*kinds, strict=True)
    return SimpleNamespace(
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.tensor(min_ps),
        sampling_seed=None if seeds is None else torch.tensor(seeds),
        is_any_greedy=any(k <= 1 for k in top_ks),
        need_top_p_sampling=any(p != 1.0 for p in top_ps),
        need_top_k_sampling=any(k != TOP_K_ALL for k in top_ks),
        need_min_p_sampling=any(p > 0 for p in min_ps),
        max_top_k=None,
        **{"sampling_mask_batch_indices": None, "grammars": None, **fields},
    )


def sample(probs: torch.Tensor, info: SimpleNamespace, positions: torch.Tensor) -> tuple[torch.Tensor, Any]:
    simple = not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling)
    before = probs.clone()
    result = sample_as_if_alone(host.Sampler._sample_from_probs, None, probs, info, positions, simple)
    assert torch.equal(probs, before), "the returned logprobs are computed from them"
    return result


def rows_with_ties(count: int) -> torch.Tensor:
    return (torch.randn(count, VOCABULARY) * 8).round().div(4).softmax(-1)


@pytest.mark.parametrize("seeds", [None, list(range(len(KINDS)))])
def test_a_row_without_any_token_harms_nothing(seeds):
    """Fails where the draw from such a row raises, which would end the scheduler, or where other rows change."""
    probs = rows_with_ties(len(KINDS))
    dead = len(KINDS) - 2
    expected = probs.argmax(-1)
    probs[dead] = torch.full((VOCABULARY,), float("-inf")).softmax(-1)
    info = info_of(KINDS, seeds, grammars=[object()])
    tokens, _ = sample_as_if_alone(host.Sampler._sample_from_probs, None, probs, info, torch.arange(len(KINDS)), False)
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    assert tokens[1] == expected[1], "a greedy row of the same batch"


def test_a_seeded_row_is_as_alone():
    """Fails where a row takes another row's path. Without the hook, rows without filters do so if others have some."""
    for _ in range(20):
        order = torch.randperm(len(KINDS) * 3).tolist()
        kinds = [KINDS[i % len(KINDS)] for i in order]
        probs, seeds = rows_with_ties(len(kinds)), torch.randint(2**40, (len(kinds),)).tolist()
        positions = torch.randint(4096, (len(kinds),))
        together, _ = sample(probs, info_of(kinds, seeds), positions)
        for row, kind in enumerate(kinds):
            one = slice(row, row + 1)
            if kind[0] == 1:  # alone, the host takes the argmax of the logits
                assert together[row] == probs[row].argmax()
            else:
                alone, _ = sample(probs[one], info_of([kind], [seeds[row]]), positions[one])
                assert together[row] == alone[0], kind


@pytest.mark.parametrize("seeds", [None, [5] * len(KINDS)], ids=["plain", "seeded"])
def test_a_greedy_row_takes_the_lowest_best_id(seeds):
    """Fails where a tie in a mixed batch goes to another id than in a greedy batch, or the row's filters change it."""
    probs = torch.full((len(KINDS), VOCABULARY), 1 / VOCABULARY)
    best = torch.randint(VOCABULARY, (len(KINDS), 5))
    probs.scatter_(1, best, 0.05)
    tokens, _ = sample(probs, info_of(KINDS, seeds), torch.arange(len(KINDS)))
    assert tokens.dtype == torch.int32
    greedy = [row for row, kind in enumerate(KINDS) if kind[0] == 1]
    assert tokens[greedy].tolist() == best.amin(1)[greedy].tolist()


def test_an_unseeded_sampled_batch_is_the_hosts():
    """Fails where our hook changes a batch that needs no change."""
    kinds = [kind for kind in KINDS if kind[0] != 1]
    probs, positions = rows_with_ties(len(kinds)), torch.arange(len(kinds))
    for batch in (kinds, [KINDS[0]] * len(kinds)):
        info = info_of(batch, None)
        torch.manual_seed(1)
        ours, _ = sample(probs, info, positions)
        torch.manual_seed(1)
        simple = batch is not kinds
        assert torch.equal(ours, host.Sampler._sample_from_probs(None, probs, info, positions, simple)[0])


@pytest.mark.parametrize("kind", [(TOP_K_ALL, 1.0, 0.1), (30, 0.9, 0.05), (3, 1.0, 0.001), (TOP_K_ALL, 1.0, 1.0)])
def test_seeded_min_p_samples_what_it_leaves(kind):
    """Fails where a token below the threshold is drawn, or the other tokens have wrong shares (chi-square)."""
    top_k, top_p, min_p = kind
    probs = torch.randn(VOCABULARY).mul(2).softmax(-1)
    ranked, ids = probs.sort(descending=True)
    kept = (torch.arange(VOCABULARY) < top_k) & (ranked.cumsum(0) - ranked <= top_p) & (ranked >= ranked[0] * min_p)
    shares = torch.where(kept, ranked, 0).double()
    shares /= shares.sum()
    count = 20_000
    many = probs.expand(count, -1)
    tokens, _ = sample(many, info_of([kind] * count, list(range(count))), torch.full((count,), 77))
    drawn = torch.bincount(tokens.long(), minlength=VOCABULARY)[ids].double()
    assert not drawn[~kept].any()
    expected = shares[kept] * count
    often = expected >= 5
    chi_square = ((drawn[kept] - expected)[often] ** 2 / expected[often]).sum()
    freedom = max(1, int(often.sum()) - 1)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 10


def test_a_captured_mask_holds_the_token():
    """Fails where the weight of the host's own token is returned for our token."""
    seeds = list(range(len(KINDS)))
    info = info_of(KINDS, seeds, sampling_mask_batch_indices=torch.arange(len(KINDS)))
    probs = torch.randn(len(KINDS), VOCABULARY).softmax(-1)
    tokens, capture = sample(probs, info, torch.arange(len(KINDS)))
    assert capture.selected_weight is None
    matches = (capture.token_ids == tokens[:, None]) & (capture.weights > 0)
    assert matches.sum(1).tolist() == [1] * len(KINDS)

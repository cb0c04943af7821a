"""Above temperature 0, `spec_generate` samples the target's own distribution, whatever the draft proposes."""

from __future__ import annotations

from itertools import product

import torch
from pairs import VOCABULARY, make_draft, make_target, random_ids

from sglang_dflash.reference import Generation

TEMPERATURE = 0.7
TOKENS = 3
SAMPLES, BATCH = 6000, 2000
WIDE = 0.15  # initializer range at which every token has a chance


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _generate(temperature: float, seed: int, ids: torch.Tensor, max_new_tokens: int) -> Generation:
    target, draft = make_target("qwen3", initializer_range=WIDE), make_draft()
    return draft.spec_generate(target, ids, max_new_tokens, [], temperature, generator=_seeded(seed), return_stats=True)


def test_same_seed_same_ids():
    """Fails where a draw does not come from the generator, or the generator has no effect."""
    ids = random_ids(9, requests=3)
    first, again, other = (_generate(TEMPERATURE, seed, ids, 30) for seed in (3, 3, 4))
    assert torch.equal(first.output_ids, again.output_ids) and first.commit_lens == again.commit_lens
    assert not torch.equal(first.output_ids, other.output_ids)
    assert len({tuple(first.new_ids(row)) for row in range(3)}) == 3


def test_temperature_near_zero_is_greedy():
    """Fails without z-lab's threshold: dividing by such a temperature overflows."""
    ids = random_ids(9)
    assert torch.equal(_generate(1e-6, 3, ids, 30).output_ids, _generate(0.0, 4, ids, 30).output_ids)


@torch.inference_mode()
def _probabilities(ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[V ** TOKENS]: the target's own probability of every answer of TOKENS tokens."""
    target = make_target("qwen3", initializer_range=WIDE)
    answers = torch.tensor(list(product(range(VOCABULARY), repeat=TOKENS)))
    logits = target(torch.cat((ids.expand(len(answers), -1), answers), dim=1)).logits.double()
    rows = logits[:, ids.shape[1] - 1 : -1] / temperature
    return rows.softmax(-1).gather(2, answers[..., None])[..., 0].prod(1)


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; answers expected fewer than five times are merged."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    seen = torch.cat((counts[~rare].double(), counts[rare].sum()[None].double()))
    return float(((seen - expected).square() / expected).sum()), len(expected) - 1


def test_joint_distribution_is_the_targets():
    """Fails where an accepted draft is more or less likely than its token, or the token after a rejection or after a
    full block is drawn from another distribution."""
    ids = random_ids(9)
    counts = torch.zeros(VOCABULARY**TOKENS, dtype=torch.int64)
    place = VOCABULARY ** torch.arange(TOKENS - 1, -1, -1)
    steps: list[int] = []
    for seed in range(SAMPLES // BATCH):
        generation = _generate(TEMPERATURE, seed, ids.expand(BATCH, -1), TOKENS)
        answers = generation.output_ids[:, ids.shape[1] :]
        counts += torch.bincount((answers * place).sum(1), minlength=len(counts))
        steps += [commit_len for request in generation.commit_lens for commit_len in request]
    assert counts.sum() == SAMPLES
    probabilities = _probabilities(ids, TEMPERATURE)
    assert abs(float(probabilities.sum()) - 1) < 1e-6
    statistic, freedom = _chi_square(counts, probabilities)
    limit = freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations
    assert freedom > 20 and statistic < limit, (statistic, freedom)
    assert 0.1 < sum(commit_len > 1 for commit_len in steps) / len(steps) < 0.9, "drafts are always or never accepted"
    # The test is strong enough to detect a slightly different temperature.
    assert _chi_square(counts, _probabilities(ids, TEMPERATURE + 0.1))[0] > limit

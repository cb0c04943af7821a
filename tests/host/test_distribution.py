"""Sampled blocks have plain decoding's distribution: SGLang's sampler, our rows and acceptance, by chi-square.

The target is a Markov chain of 16 tokens: the logits of a row depend only on the row's id. Thousands of requests start
from one token. The tokens that they commit in several blocks are compared with the exact probabilities of plain
decoding, in float64. There are 210 p-values, each tested against `THRESHOLD`: fewer than one in 10,000 seeds would fail
a correct implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sglang.srt.layers.sampler import Sampler
from stand_ins import Batch, configured, copies, make_req, make_row_sampler, make_rows, make_sampler, output_of

from sglang_cpu.ops import murmur_hash32
from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyRows
from sglang_dflash.host.patches import sampler
from sglang_dflash.host.worker.penalties import asks_for_penalties

pytestmark = pytest.mark.slow

KERNELS = ops.choose_kernels("cpu", torch.float32)

VOCAB, WIDTH, TOKENS = 16, 4, 4
REQUESTS, PENALISED = 16_000, 8_000  # fewer with penalties, whose counts are made request by request
START = 3  # the token that every request has emitted last
THRESHOLD = 5e-7
RANKS = (2, 0, 1)  # of the drafts among the target's most likely tokens; the first is seldom accepted
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11), dtype=torch.float64)  # logits by token
MARGINALS = ((0,), (0, 1), (1, 2), (2, 3), (0, 1, 2))  # token places whose joint counts are compared


@pytest.fixture(scope="module", autouse=True)
def _configured():
    with configured():
        yield


@dataclass(frozen=True, slots=True)
class Asked:
    """Sampling parameters of a request, and what it has emitted before `START`."""

    params: dict[str, Any]
    history: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> Any:
        neutral = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        return self.params.get(name, neutral.get(name, 0))


CASES = {
    "greedy": Asked({"top_k": 1}),
    "temperature 1": Asked({}),
    "temperature 0.6": Asked({"temperature": 0.6}),
    "temperature 1.7": Asked({"temperature": 1.7}),
    "top_k": Asked({"top_k": 6}),
    "top_p": Asked({"top_p": 0.8}),
    "min_p": Asked({"min_p": 0.2}),
    "all filters": Asked({"temperature": 1.3, "top_k": 9, "top_p": 0.85, "min_p": 0.1}),
    "bias": Asked({"logit_bias": {"2": 1.5, "7": -3.0}}),
    "frequency": Asked({"frequency_penalty": 0.9}, (5, 5, 8)),
    "presence": Asked({"presence_penalty": 1.2}, (5, 9)),
    "repetition": Asked({"repetition_penalty": 1.8}, (1,)),
    "rewards": Asked({"frequency_penalty": -0.7, "presence_penalty": -0.4, "repetition_penalty": 0.6}),
    "minimum": Asked({"min_new_tokens": 4, "stop_token_ids": [6, 9]}, (2,)),
    "all at once": Asked(
        {
            **{"temperature": 0.8, "top_k": 11, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.5},
            **{"presence_penalty": 0.3, "repetition_penalty": 1.3, "logit_bias": {"4": 1.0}},
        },
        (7, 7, 12),
    ),
}


def next_probabilities(emitted: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Plain decoding's probabilities of the next token after each of N histories ([N, L], up to the last token).

    Returns:
        [N, V] float64.
    """
    logits = TABLE[emitted[:, -1]]
    counts = torch.nn.functional.one_hot(emitted, VOCAB).sum(1)  # [N, V]
    logits = logits - asked.frequency_penalty * counts - asked.presence_penalty * (counts > 0)
    scaled = torch.where(logits < 0, logits * asked.repetition_penalty, logits / asked.repetition_penalty)
    logits = torch.where(counts > 0, scaled, logits)
    if emitted.shape[1] < asked.min_new_tokens:
        logits[:, [0, *asked.stop_token_ids]] = -torch.inf  # 0 ends a sequence
    for token, bias in (asked.logit_bias or {}).items():
        logits[:, int(token)] += bias
    probabilities = (logits / asked.temperature).softmax(-1)
    ordered, ids = probabilities.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    assert asked.top_p == 1 or (before - asked.top_p).abs().min() > 1e-6, "float32 may cut at another token"
    dropped = (torch.arange(VOCAB) >= asked.top_k) | (before > asked.top_p) | (ordered < ordered[:, :1] * asked.min_p)
    kept = torch.zeros_like(ordered).scatter(1, ids, ordered.masked_fill(dropped, 0))
    return kept / kept.sum(-1, keepdim=True)


def exact_joint(asked: Asked) -> torch.Tensor:
    """[V] * TOKENS float64: probabilities of the tokens after `START`."""
    emitted = torch.tensor([[*asked.history, START]])
    joint = torch.ones(1, dtype=torch.float64)
    for _ in range(TOKENS):
        joint = (joint[:, None] * next_probabilities(emitted, asked)).flatten()
        following = torch.arange(VOCAB).repeat(len(emitted))[:, None]
        emitted = torch.cat((emitted.repeat_interleave(VOCAB, 0), following), dim=1)
    return joint.view((VOCAB,) * TOKENS)


def draft_from(anchors: torch.Tensor) -> torch.Tensor:
    """[B] -> [B, W]: the anchor, and then likely tokens, each following the one before."""
    ranked = TABLE.argsort(-1, descending=True)
    ids = [anchors]
    for place in range(WIDTH - 1):
        ids.append(ranked[ids[-1], RANKS[place]])
    return torch.stack(ids, dim=1)


def trimmed(ids: torch.Tensor, prefix_lens: torch.Tensor) -> VerifyRows:
    """Rows as a policy that trims hard leaves them: by the anchor and by where the text stands, so by the prefix alone.

    ids: [B, W] int64.
    """
    lens = 1 + (3 * ids[:, 0] + 5 * prefix_lens) % WIDTH
    positions = prefix_lens[:, None] + torch.arange(WIDTH)
    block = Block(ids, positions, positions, prefix_lens, torch.arange(len(ids)))
    return VerifyRows.of(block, ids, ops.keep_rows(lens, WIDTH, int(lens.sum())))


def generate(batch: Batch, biased: float = 0.0, trims: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks until every request has `TOKENS` new tokens.

    Args:
        biased: probability of a planted error: a draft is accepted although the target chose another token.
        trims: see `trimmed`; otherwise all `WIDTH` rows are verified.

    Returns:
        [B, TOKENS] int64, and how often each number of tokens was committed, [W + 1].
    """
    count = len(batch.reqs)
    sampler = make_row_sampler(make_sampler(), VOCAB, WIDTH)
    group = sampler.prefill(batch)
    anchors = torch.full((count,), START)
    sampler.commit_first(batch, group, anchors)
    out = torch.zeros(count, TOKENS + WIDTH, dtype=torch.int64)
    lens, commits = torch.zeros(count, dtype=torch.int64), torch.zeros(WIDTH + 1, dtype=torch.int64)
    prefix_lens = torch.full((count,), 9)
    while lens.min() < TOKENS:
        rows = (trimmed if trims else make_rows)(draft_from(anchors), prefix_lens)
        logits = TABLE[rows.ids].float()
        target_ids, group = sampler.choose(batch, rows, output_of(logits), None, None)
        accepted = _accept(rows, target_ids, biased)
        sampler.commit(batch, group, accepted.out_ids, accepted.commit_lens)
        places = (lens[:, None] + torch.arange(WIDTH)).clamp(max=TOKENS + WIDTH - 1)
        out.scatter_(1, places, accepted.out_ids)  # ids beyond the committed ones are overwritten by the next block
        lens = (lens + accepted.commit_lens).clamp(max=TOKENS)
        commits += accepted.commit_lens.bincount(minlength=WIDTH + 1)
        anchors, prefix_lens = accepted.bonus_ids, prefix_lens + accepted.commit_lens
        for req, ids in zip(batch.reqs, accepted.out_ids.tolist(), strict=True):
            req.output_ids.extend(ids)  # only their number matters: it bounds what the worker gathers
    return out[:, :TOKENS], commits


def _accept(rows: VerifyRows, target_ids: torch.Tensor, biased: float) -> ops.GreedyAcceptance:
    ids, target_ids = rows.chains(), rows.blocks(target_ids).clone()
    if biased:
        forced = torch.rand(len(ids), WIDTH - 1) < biased
        target_ids[:, :-1] = torch.where(forced, ids[:, 1:], target_ids[:, :-1])
    return KERNELS.accept_chain(target_ids, ids)


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-square. Cells expected fewer than eight times are merged; 0 if an impossible cell is hit."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    rare = expected < 8
    observed, expected = (torch.cat((x[~rare], x[rare].sum()[None])).double() for x in (counts, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected).square() / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if len(expected) > 1 else 1.0


def p_values(tokens: torch.Tensor, exact: torch.Tensor) -> list[float]:
    """One per joint count of `MARGINALS`."""
    values = []
    for places in MARGINALS:
        cells = torch.zeros(len(tokens), dtype=torch.int64)
        for place in places:
            cells = cells * VOCAB + tokens[:, place]
        others = [place for place in range(TOKENS) if place not in places]
        values.append(p_value(cells.bincount(minlength=VOCAB ** len(places)), exact.sum(others).flatten()))
    return values


def batch_of(cases: list[Asked], count: int) -> Batch:
    """`count` requests that alternate between the cases."""
    made = [make_req(vocab_size=VOCAB, output_ids=asked.history, max_new_tokens=999, **asked.params) for asked in cases]
    turns = zip(*(copies(req, count // len(cases)) for req in made), strict=True)
    reqs = [req for turn in turns for req in turn]
    for slot, req in enumerate(reqs):
        req.kv.req_pool_idx = slot
    return Batch(reqs, VOCAB)


def show(name: str, values: list[float]) -> None:
    print(f"{name}: p = {', '.join(f'{p:.2g}' for p in values)}")


@pytest.mark.parametrize("name", [name for name in CASES if name != "greedy"])
def test_blocks_are_plain_decoding(name):
    """Fails where the distribution of the committed tokens differs from plain decoding's for a parameter or a row, or
    where a token is committed that plain decoding excludes."""
    torch.manual_seed(20261121)
    asked = CASES[name]
    tokens, commits = generate(batch_of([asked], PENALISED if asks_for_penalties(asked) else REQUESTS))
    values = p_values(tokens, exact_joint(asked))
    show(f"{name}, commit lengths 1..{WIDTH} {commits[1:].tolist()}", values)
    assert commits[1:].min() > 50, "some lengths are hardly ever committed"
    assert min(values) > THRESHOLD


@pytest.mark.parametrize("name", ["temperature 1", "all filters", "frequency", "all at once"])
def test_trimmed_blocks_are_plain_decoding(name):
    """Fails where the distribution of tokens differs from plain decoding's under a policy that trims hard."""
    torch.manual_seed(20261121)
    asked = CASES[name]
    batch = batch_of([asked], PENALISED if asks_for_penalties(asked) else REQUESTS)
    tokens, commits = generate(batch, trims=True)
    values = p_values(tokens, exact_joint(asked))
    show(f"{name}, commit lengths 1..{WIDTH} {commits[1:].tolist()}", values)
    assert commits[1:].min() > 20, "some lengths are hardly ever committed"
    assert min(values) > THRESHOLD


@pytest.mark.parametrize("hooked", [False, True], ids=["host", "hooked"])
def test_requests_of_one_batch_keep_their_own(monkeypatch, hooked):
    """Fails where a row is sampled with another request's parameters, with our hook on the sampler and without."""
    torch.manual_seed(20261122)
    if hooked:
        original = Sampler._sample_from_probs
        sample = sampler.sample_as_if_alone
        monkeypatch.setattr(Sampler, "_sample_from_probs", lambda *arguments: sample(original, *arguments))
    names = ["top_k", "temperature 1.7", "min_p", "greedy", "frequency", "minimum", "all at once", "all filters"]
    tokens, _ = generate(batch_of([CASES[name] for name in names], REQUESTS))
    for case, name in enumerate(names):
        values = p_values(tokens[case :: len(names)], exact_joint(CASES[name]))
        show(name, values)
        assert min(values) > THRESHOLD


@pytest.mark.parametrize("trims", [False, True], ids=["whole", "trimmed"])
def test_blocks_that_the_op_samples(trims):
    """Fails where the distribution differs from plain decoding's if the op `sample_rows` draws, as on CUDA with
    flashinfer. SGLang's sampler would raise: there is no flashinfer here."""
    torch.manual_seed(20261130)
    filters = {"temperature": 0.8, "top_k": 9, "top_p": 0.85}
    penalised = {"top_k": 11, "presence_penalty": 0.4, "repetition_penalty": 1.3, "logit_bias": {"4": 1.0}}
    cases = [CASES["top_k"], Asked(filters), Asked({**filters, **penalised}, (7, 7, 12)), CASES["greedy"]]
    with configured(sampling_backend="flashinfer"):
        tokens, _ = generate(batch_of(cases, REQUESTS), trims=trims)
    for number, asked in enumerate(cases):
        values = p_values(tokens[number :: len(cases)], exact_joint(asked))
        show(str(asked.params), values)
        assert min(values) > THRESHOLD


@pytest.mark.parametrize("name", ["temperature 1", "all at once"])
def test_a_biased_acceptance_is_seen(name):
    """Fails where the statistics miss that 2% of the drafts are accepted although the target chose another token."""
    torch.manual_seed(20261121)
    tokens, _ = generate(batch_of([CASES[name]], 24_000), biased=0.02)
    values = p_values(tokens, exact_joint(CASES[name]))
    show(f"{name}, biased", values)
    assert min(values) < THRESHOLD


@pytest.mark.parametrize("other", ["temperature 0.6", "top_k", "frequency", "bias"])
def test_another_distribution_is_seen(other):
    """Fails where the statistics accept the tokens of requests with other parameters."""
    torch.manual_seed(20261121)
    tokens, _ = generate(batch_of([CASES["temperature 1"]], 4000))
    assert min(p_values(tokens, exact_joint(CASES[other]))) < THRESHOLD


# With seeds, blocks give the same tokens as single tokens, not only the same distribution.


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 6, "top_p": 0.8}], ids=str)
def test_seeded_blocks_are_plain_decoding_token_by_token(monkeypatch, params):
    """Fails where a row's noise is that of another request or position."""
    monkeypatch.setattr("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32)  # Triton's, without a GPU
    count = 500
    with configured(enable_deterministic_inference=True):
        reqs = [make_req(slot=i, vocab_size=VOCAB, sampling_seed=i, **params) for i in range(count)]
        in_blocks, _ = generate(Batch(reqs, VOCAB))
        plain, info = make_sampler(), Batch(reqs, VOCAB).sampling_info
        last, one_by_one = torch.full((count,), START), []
        for position in range(9, 9 + TOKENS):
            positions = torch.full((count,), position)
            last = plain(output_of(TABLE[last].float()), info, False, [], [], positions).long()
            one_by_one.append(last)
    assert torch.equal(in_blocks, torch.stack(one_by_one, dim=1))
    assert len(in_blocks.unique(dim=0)) > count / 2, "seeds hardly change the tokens"

"""Our penalties against SGLang's own penalizers, which get a request's tokens one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from plain_decoding import PENALIZERS, Host, One
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.penaltylib import BatchedPenalizerOrchestrator
from stand_ins import Batch, configured, make_req, make_rows

from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyRows
from sglang_dflash.host.patches.block_results import order_penalizers
from sglang_dflash.host.worker.penalties import RequestPenalties, asks_for_penalties, stop_ids

KERNELS = ops.choose_kernels("cpu", torch.float32)


@pytest.fixture(scope="module", autouse=True)
def _configured():
    with configured():
        yield


def bits(x: torch.Tensor) -> list:
    return x.contiguous().view(torch.int32).tolist()


def ask(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    """Parameters of a request that may ask for any penalty, or for none."""
    asked: dict[str, Any] = {}
    if rng.random() < 0.5:
        asked["frequency_penalty"] = rng.choice([rng.uniform(-2, 2), 0.1, -0.3])
    if rng.random() < 0.5:
        asked["presence_penalty"] = rng.uniform(-2, 2)
    if rng.random() < 0.5:
        asked["repetition_penalty"] = rng.choice([rng.uniform(0.05, 2), 1.1])
    if rng.random() < 0.5:
        asked["min_new_tokens"] = rng.randrange(20)
        asked["stop_token_ids"] = rng.sample(range(vocab_size), rng.randrange(4))
    return asked


def params_of(penalties: RequestPenalties, reqs: Sequence[Req]) -> ops.PenaltyParams:
    """The parameters that a worker makes from a batch of these requests."""
    for slot, req in enumerate(reqs):
        req.kv.req_pool_idx = slot
    batch = Batch(reqs, reqs[0].vocab_size)
    penalties.prefill(batch)
    group = penalties.group(batch)
    assert group.requests.tolist() == list(range(len(reqs)))
    return group.params


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_the_hosts_bit_for_bit(seed):
    """Fails where a row of a block differs by a bit from the host's penalizers, after they get the emitted tokens and
    the drafts before that row; or where a row of another request changes."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    width, vocab_size, batch = rng.randint(2, 16), rng.randint(17, 500), rng.randint(1, 6)
    reqs = [make_req(vocab_size=vocab_size, eos_token_ids={5}, **ask(rng, vocab_size)) for _ in range(batch)]
    asking = [index for index, req in enumerate(reqs) if asks_for_penalties(req.sampling_params)]
    if not asking:
        asking, reqs[0] = [0], make_req(vocab_size=vocab_size, frequency_penalty=0.3)
    rng.shuffle(asking)
    few = rng.choice([2, 5, vocab_size])
    block_ids = torch.randint(few, (len(asking), width), generator=generator)
    emitted = [[rng.randrange(few) for _ in range(rng.randrange(12))] + [int(ids[0])] for ids in block_ids]

    ours = ops.EmittedTokens(vocab_size, "cpu")
    for row, index in enumerate(asking):
        ours.start(row, torch.tensor(emitted[row]), reqs[index].sampling_params.frequency_penalty)
    params = params_of(RequestPenalties(vocab_size, width, "cpu", KERNELS), [reqs[index] for index in asking])
    logits = torch.randn(batch, width, vocab_size, generator=generator) * rng.choice([0.1, 4.0, 100.0])
    for index in set(range(batch)) - set(asking):
        logits[index, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    before = logits.clone()
    most = max(map(len, emitted)) + rng.randrange(5)  # padding ids follow a request's tokens
    block = ops.BlockRows.whole(torch.tensor(asking), block_ids)
    ops.penalize(logits.view(-1, vocab_size), block, ours.of(torch.arange(len(asking)), most), params)

    for row, index in enumerate(asking):
        host = Host(reqs[index], vocab_size).emit(emitted[row])
        for place in range(width):
            host.emit(block_ids[row, place : place + 1].tolist() if place else [])
            assert bits(logits[index, place]) == bits(host.penalized(before[index, place])), (index, place)
    for index in set(range(batch)) - set(asking):
        assert bits(logits[index]) == bits(before[index])


def random_rows(rng: random.Random, anchors: list[int], few: int) -> VerifyRows:
    """Random numbers of rows of each block, with ids below `few`."""
    width = rng.randint(2, 9)
    ids = torch.tensor([[anchor, *(rng.randrange(few) for _ in range(width - 1))] for anchor in anchors])
    requests = torch.arange(len(anchors))
    lens = torch.tensor([rng.randint(1, width) for _ in anchors])
    return VerifyRows.of(Block(ids, ids, ids, requests, requests), ids, ops.keep_rows(lens, width, int(lens.sum())))


@pytest.mark.parametrize("seed", range(40))
def test_every_row_of_some_is_the_hosts_bit_for_bit(seed):
    """Fails where a row differs by a bit from the host's penalizers, after they get the emitted tokens and
    the drafts before that row; or where a row of a request without penalties changes."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vocab_size, batch = rng.randint(17, 200), rng.randint(1, 6)
    few = rng.choice([2, 5, vocab_size])
    emitted = [[rng.randrange(few) for _ in range(rng.randint(1, 12))] for _ in range(batch)]
    reqs = [
        make_req(slot=slot, vocab_size=vocab_size, output_ids=ids, eos_token_ids={5}, **ask(rng, vocab_size))
        for slot, ids in enumerate(emitted)
    ]
    reqs[0].sampling_params.frequency_penalty = 0.3
    held, penalties = Batch(reqs, vocab_size), RequestPenalties(vocab_size, 9, "cpu", KERNELS)
    group, rows = penalties.prefill(held), random_rows(rng, [ids[-1] for ids in emitted], few)
    logits = torch.randn(len(rows.ids), vocab_size, generator=generator) * rng.choice([0.1, 4.0, 100.0])
    before = logits.clone()
    penalties.apply(group, logits, rows)
    first = 0
    for req, ids, chain in zip(reqs, emitted, rows.chains().tolist(), strict=True):
        drafts = [token for token in chain[1:] if token >= 0]
        for row in range(first, first + 1 + len(drafts)):
            expected, path = before[row], drafts[: row - first]
            if asks_for_penalties(req.sampling_params):
                expected = Host(req, vocab_size).emit(ids + path).penalized(before[row])
            assert bits(logits[row]) == bits(expected), (ids, path)
        first += 1 + len(drafts)


@pytest.mark.parametrize("seed", range(20))
def test_one_row_in_two_parts_is_the_hosts(seed):
    """Fails where the penalties of a prefill for a request that comes back differ from the host's."""
    rng = random.Random(seed)
    vocab_size = rng.randint(17, 300)
    req = make_req(vocab_size=vocab_size, eos_token_ids={5}, **(ask(rng, vocab_size) | {"presence_penalty": 0.7}))
    emitted = [rng.randrange(vocab_size) for _ in range(rng.randrange(15))]
    ours = ops.EmittedTokens(vocab_size, "cpu")
    ours.start(0, torch.tensor(emitted, dtype=torch.int64), req.sampling_params.frequency_penalty)
    params = params_of(RequestPenalties(vocab_size, 4, "cpu", KERNELS), [req])
    additive, scaling = ops.penalties_of(ours.of(torch.tensor([0]), len(emitted)), params)

    host = Host(req, vocab_size).emit(emitted).penalizers
    expected = torch.zeros(1, vocab_size)
    host.accumulate_additive_penalties(expected)
    assert torch.equal(additive, expected)
    host_scaling = host.accumulate_scaling_penalties()
    assert torch.equal(scaling, torch.ones(1, vocab_size) if host_scaling is None else host_scaling)


@pytest.mark.parametrize("order", permutations(PENALIZERS))
def test_penalizers_add_and_then_scale(order):
    """Fails where a logit depends on the order of the host's set."""
    req = make_req(frequency_penalty=0.3, presence_penalty=0.7, repetition_penalty=1.7, min_new_tokens=9)
    batch = One(req)
    penalizers = BatchedPenalizerOrchestrator(128, batch, order)  # a sequence: keeps its order
    assert list(penalizers.penalizers) == list(order)
    order_penalizers(None, penalizers)
    assert list(penalizers.penalizers) == sorted(PENALIZERS, key=lambda p: (p.is_multiplicative, p.__name__))
    for token in (7, 7, 9):
        penalizers.cumulate_output_tokens(torch.tensor([token]))
    row = torch.full((1, 128), 2.0)
    penalizers.apply(row)
    f, p, r = (torch.tensor(value) for value in (0.3, 0.7, 1.7))
    assert row[0, 7] == (2 - (f + f) - p) / r
    assert row[0, 9] == (2 - f - p) / r
    assert row[0, 0].isneginf() and row[0, 1] == 2


@pytest.mark.parametrize(
    ("asked", "asks"),
    [
        ({}, False),
        ({"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}, False),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"min_new_tokens": 1}, True),
        ({"stop_token_ids": [3]}, False),
    ],
)
def test_who_asks(asked, asks):
    """Fails where we and the host disagree on whether a request is penalised."""
    req = make_req(**asked)
    assert asks_for_penalties(req.sampling_params) == asks
    assert Host(req, 128).penalizers.is_required == asks


@pytest.mark.parametrize("stops", [[], [3], [3, 9, 11]])
@pytest.mark.parametrize("eos", [None, {5}, {5, 6}])
@pytest.mark.parametrize("additional", [None, {7, 0}])
def test_masked_ids_are_the_hosts(stops, eos, additional):
    """Fails where a stop id can end an answer before its minimum, or another id is masked."""
    req = make_req(min_new_tokens=4, stop_token_ids=stops, eos_token_ids=eos)
    req.tokenizer.additional_stop_token_ids = additional
    masked = Host(req, 128).penalized(torch.zeros(128)).isneginf().nonzero().flatten()
    assert sorted(stop_ids(req)) == masked.tolist()


def test_a_request_that_cannot_stop_masks_nothing():
    """Fails where a tokenizer without an end-of-sequence id raises, or id 0 is masked instead."""
    req = make_req(min_new_tokens=4)
    req.tokenizer.eos_token_id = None
    assert stop_ids(req) == set()
    others = [make_req(min_new_tokens=2, stop_token_ids=ids) for ids in ([3, 4], [5])]
    for other in others:
        other.tokenizer.eos_token_id = None
    params = params_of(RequestPenalties(128, 4, "cpu", KERNELS), [req, *others])
    assert params.min_new_tokens.tolist() == [0, 2, 2]
    assert [set(ids) for ids in params.stop_ids.tolist()][1:] == [{3, 4}, {5}]


def test_a_batch_without_penalties_has_no_group():
    """Fails where a batch without penalties has the overhead of penalties."""
    penalties = RequestPenalties(128, 4, "cpu", KERNELS)
    batch = Batch([make_req(slot=0), make_req(slot=1)], 128)
    assert penalties.prefill(batch) is None
    assert penalties.group(batch) is None
    asking = Batch([make_req(slot=0), make_req(slot=1, presence_penalty=1.0)], 128)
    assert penalties.prefill(asking).requests.tolist() == [1]


def test_a_request_that_comes_back_is_prefilled_with_its_counts():
    """Fails where a retracted request's next token ignores the tokens emitted before, or where those tokens penalise
    the other request of the batch."""
    back = make_req("back", 3, output_ids=[7, 7, 9], frequency_penalty=0.5, repetition_penalty=1.5, min_new_tokens=4)
    batch = Batch([make_req("new", 1, presence_penalty=0.25), back], 128)
    RequestPenalties(128, 4, "cpu", KERNELS).prefill(batch)
    info = batch.sampling_info
    assert info.acc_additive_penalties[1, [7, 9, 0, 8]].tolist() == [-1.0, -0.5, -torch.inf, 0.0]
    assert info.acc_scaling_penalties[1, [7, 9, 8]].tolist() == [1.5, 1.5, 1.0]
    assert not info.acc_additive_penalties[0].any()
    assert info.acc_scaling_penalties[0].eq(1).all()


def test_running_requests_of_a_mixed_batch_keep_their_counts():
    """Fails where a prefill resets the counts of the running requests in its batch to one step earlier, or uses the
    host's counts for them."""
    penalties = RequestPenalties(16, 4, "cpu", KERNELS)
    running = make_req("running", 0, vocab_size=16, frequency_penalty=1.0)
    first = Batch([running], 16)
    penalties.commit(penalties.prefill(first), torch.tensor([[3]]), torch.tensor([1]))
    new = make_req("new", 1, vocab_size=16, frequency_penalty=2.0)
    mixed = Batch([new, running], 16, decoding_reqs=[running])  # the host has not yet heard of token 3
    group = penalties.prefill(mixed)
    assert mixed.sampling_info.acc_additive_penalties[1].nonzero().tolist() == [[3]]
    penalties.commit(group, torch.tensor([[5], [4]]), torch.tensor([1, 1]))
    logits = torch.zeros(4, 16)
    batch = Batch([running, new], 16)
    penalties.apply(penalties.group(batch), logits, make_rows(torch.tensor([[4, 4], [5, 6]])))
    assert logits[0, [3, 4, 5]].tolist() == [-1, -1, 0]
    assert logits[2, [3, 4, 5]].tolist() == [0, 0, -2]

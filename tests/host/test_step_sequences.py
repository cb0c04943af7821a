"""Sequences of steps in the order of an overlapping scheduler: each row sees exactly what was emitted before it.

A small random scheduler: requests arrive, are prefilled in chunks, alone or together with running requests, decode, are
retracted and lose their last step, come back in another slot, and end, after which others get their slots. Lists hold
what the device has emitted; under overlap, the host's `Req.output_ids` lag by one step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from stand_ins import Batch, configured, make_req, make_row_sampler, make_rows, output_of

from sglang_dflash import ops

VOCAB, SLOTS = 24, 4
WHAT_MUST_HAPPEN = ("came back", "slot again", "row of penalties", "view", "row of a mixed batch")
PROCESSOR = DisallowedTokensLogitsProcessor.to_str()


@pytest.fixture(scope="module", autouse=True)
def _configured():
    with configured():
        yield


def expected_row(row: torch.Tensor, emitted: list[int], asked: dict[str, Any]) -> torch.Tensor:
    """The penalised row by definition: in float64, with multiples of 1/4, so exact."""
    row = row.double()
    for token in set(emitted):
        row[token] -= asked.get("frequency_penalty", 0.0) * emitted.count(token) + asked.get("presence_penalty", 0.0)
        scale = asked.get("repetition_penalty", 1.0)
        row[token] = row[token] * scale if row[token] < 0 else row[token] / scale
    if len(emitted) < asked.get("min_new_tokens", 0):
        row[[0, *asked["stop_token_ids"]]] = -torch.inf
    return row


@dataclass
class Running:
    """One request: its parameters, the tokens emitted for it, and those of them that the host does not know yet."""

    rid: str
    asked: dict[str, Any]
    processor: str | None
    custom: Any
    emitted: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    req: Req | None = None

    def admit(self, slot: int) -> None:
        known = [] if self.req is None else list(self.req.output_ids)
        if self.req is None:
            self.req = make_req(self.rid, 0, VOCAB, (), self.processor, custom_params=self.custom, **self.asked)
        self.emitted, self.pending = known, []  # a retraction loses what the host did not know
        self.req.kv.req_pool_idx = slot


class Scheduler:
    def __init__(self, seed: int, width: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.width = width
        self.overlap = self.rng.random() < 0.75
        self.calls: list[tuple[torch.Tensor, Any]] = []
        self.sampler = make_row_sampler(self._sample, VOCAB, width)
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.free = list(range(SLOTS))
        self.made = 0
        self.seen = dict.fromkeys(WHAT_MUST_HAPPEN, 0)
        self._used: set[int] = set()

    def _sample(self, out: Any, info: Any, *_: Any) -> torch.Tensor:
        self.calls.append((out.next_token_logits.clone(), info))
        assert info.acc_additive_penalties is None and len(info) == len(out.next_token_logits)
        return self.next_choice

    def ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(VOCAB if self.rng.random() < 0.5 else 3, shape, generator=self.generator)

    def arrive(self) -> None:
        rng = self.rng
        asked: dict[str, Any] = {"temperature": 1.0}
        if rng.random() < 0.6:
            asked |= {"frequency_penalty": rng.randrange(-8, 9) / 4, "presence_penalty": rng.randrange(-8, 9) / 4}
        if rng.random() < 0.4:
            asked["repetition_penalty"] = rng.choice([0.5, 2.0])
        if rng.random() < 0.4:
            asked |= {"min_new_tokens": rng.randrange(1, 20), "stop_token_ids": [rng.randrange(VOCAB)]}
        processor = PROCESSOR if rng.random() < 0.5 else None
        custom = rng.choice([{"token_ids": [1], "mine": self.made}, {"token_ids": [2]}])
        if processor is None and rng.random() < 0.5:
            custom = None
        self.waiting.append(Running(f"request {self.made}", asked, processor, custom))
        self.made += 1

    def launched(self, participants: list[Running], new_tokens: list[list[int]]) -> None:
        """A step is launched; under overlap, the host learns only now of the previous step."""
        self._host_learns()
        for running, new in zip(participants, new_tokens, strict=True):
            running.emitted += new
            running.pending = new
        if not self.overlap:
            self._host_learns()

    def _host_learns(self) -> None:
        for running in self.running:
            running.req.output_ids.extend(running.pending)
            running.pending = []

    def prefill(self) -> None:
        chosen = self.waiting[: min(len(self.free), self.rng.randint(1, 2))]
        if not chosen:
            return
        del self.waiting[: len(chosen)]
        for running in chosen:
            slot = self.free.pop(self.rng.randrange(len(self.free)))
            self.seen["came back"] += running.req is not None
            self.seen["slot again"] += slot in self._used
            self._used.add(slot)
            running.admit(slot)
        for _ in range(self.rng.randrange(3)):
            self._extend(chosen, last=False)
            if self.running and self.rng.random() < 0.5:
                self.decode()
        self._extend(chosen, last=True)
        self.running += chosen

    def _extend(self, chosen: list[Running], last: bool) -> None:
        """One chunk of a prefill, perhaps with running requests. Tokens of `chosen` count only in the last chunk."""
        tails = self.running if self.rng.random() < 0.3 else []
        batch = Batch([running.req for running in chosen + tails], VOCAB, decoding_reqs=[r.req for r in tails] or None)
        group = self.sampler.prefill(batch)
        self._check_prefill(batch, chosen + tails)
        if batch.sampling_info.has_custom_logit_processor:
            for running, params in zip(tails, batch.sampling_info.custom_params[len(chosen) :], strict=True):
                self._check_view(running, params, running.emitted)
        ids = self.ids(len(chosen) + len(tails))
        self.sampler.commit_first(batch, group, ids)
        self.seen["row of a mixed batch"] += len(tails)
        first = 0 if last else len(chosen)
        self.launched((chosen + tails)[first:], ids[first:, None].tolist())

    def _check_prefill(self, batch: Batch, requests: list[Running]) -> None:
        info = batch.sampling_info
        if info.acc_additive_penalties is None:
            return
        logits = torch.randint(-20, 20, (len(requests), VOCAB), generator=self.generator) / 4
        rows = logits + info.acc_additive_penalties
        if info.acc_scaling_penalties is not None:
            rows = torch.where(rows < 0, rows * info.acc_scaling_penalties, rows / info.acc_scaling_penalties)
        for running, row, before in zip(requests, rows, logits, strict=True):
            assert torch.equal(row.double(), expected_row(before, running.emitted, running.asked)), running

    def decode(self) -> None:
        batch = Batch([running.req for running in self.running], VOCAB)
        ids = self.ids(len(self.running), self.width)
        ids[:, 0] = torch.tensor([running.emitted[-1] for running in self.running])
        accept = torch.rand(ids.shape, generator=self.generator) < 0.7
        choice = torch.where(accept, ids.roll(-1, 1), self.ids(*ids.shape))
        self.next_choice = choice.flatten().int()
        logits = torch.randint(-20, 20, (ids.numel(), VOCAB), generator=self.generator) / 4
        chosen, group = self.sampler.choose(batch, make_rows(ids), output_of(logits.clone()), None, None)
        target_ids = chosen.view(ids.shape)
        assert torch.equal(target_ids, choice)
        self._check_rows(ids, logits)
        accepted = ops.choose_kernels("cpu", torch.float32).accept_chain(target_ids, ids)
        self.sampler.commit(batch, group, accepted.out_ids, accepted.commit_lens)
        lens = accepted.commit_lens.tolist()
        new = [ids[:length] for ids, length in zip(accepted.out_ids.tolist(), lens, strict=True)]
        self.launched(self.running, new)

    def _check_rows(self, ids: torch.Tensor, before: torch.Tensor) -> None:
        logits, info = self.calls.pop()
        for place, running in enumerate(self.running):
            for row in range(self.width):
                so_far = running.emitted + ids[place, 1 : row + 1].tolist()
                at = place * self.width + row
                assert torch.equal(logits[at].double(), expected_row(before[at], so_far, running.asked)), running
                self.seen["row of penalties"] += len(running.asked) > 1
                if info.has_custom_logit_processor:
                    self._check_view(running, info.custom_params[at], so_far)

    def _check_view(self, running: Running, params: Any, so_far: list[int]) -> None:
        req = running.req
        if running.processor is None:
            assert params is req.sampling_params.custom_params
            return
        view = params["__req__"]
        assert list(view.output_ids) == so_far
        assert view.output_ids.typecode == "q"
        assert [*view.origin_input_ids, *view.output_ids] == [1, 2, 3, *so_far]
        assert view.rid == running.rid and view.sampling_params is req.sampling_params
        assert {**params, "__req__": 0} == {**running.custom, "__req__": 0}
        assert req.sampling_params.custom_params["__req__"] is not view
        self.seen["view"] += 1

    def retract(self) -> None:
        running = self.running.pop(self.rng.randrange(len(self.running)))
        self.free.append(running.req.kv.req_pool_idx)
        self.waiting.append(running)

    def end(self) -> None:
        """The slot is free at once, although a step of the request may still be running on the device."""
        running = self.running.pop(self.rng.randrange(len(self.running)))
        self.free.insert(0, running.req.kv.req_pool_idx)

    def step(self) -> None:
        what = self.rng.random()
        if what < 0.3 or not self.running:
            if len(self.waiting) < 2:
                self.arrive()
            self.prefill()
        elif what < 0.8:
            self.decode()
        elif what < 0.92:
            self.retract()
        else:
            self.end()


@pytest.mark.parametrize("seed", range(12))
def test_rows_see_what_was_emitted(seed):
    """Fails where a row's penalties or a processor's view miss a token, count one that was rejected or lost in a
    retraction, keep tokens of the slot's earlier request, or lag by a step."""
    scheduler = Scheduler(seed, width=random.Random(seed).choice([2, 4, 7]))
    for _ in range(80):
        scheduler.step()
    assert all(scheduler.seen.values()), scheduler.seen


def test_a_slot_is_given_away_with_a_step_unread():
    """Fails where unread tokens of an ended request are counted for the request that gets its slot."""
    sampler = make_row_sampler(lambda *_: torch.tensor([4, 5]), VOCAB, 2)
    asked = {"processor": PROCESSOR, "custom_params": {"token_ids": [1]}, "frequency_penalty": 1.0}
    old, new = (make_req(rid, 0, VOCAB, **asked) for rid in ("old", "new"))
    batch = Batch([old], VOCAB)
    group = sampler.prefill(batch)
    sampler.commit_first(batch, group, torch.tensor([3]))
    _, group = sampler.choose(batch, make_rows(torch.tensor([[3, 4]])), output_of(torch.zeros(2, VOCAB)), None, None)
    sampler.commit(batch, group, torch.tensor([[4, 5]]), torch.tensor([2]))
    batch = Batch([new], VOCAB)
    group = sampler.prefill(batch)
    sampler.commit_first(batch, group, torch.tensor([7]))
    out = output_of(torch.zeros(2, VOCAB))
    sampler.choose(batch, make_rows(torch.tensor([[7, 9]])), out, None, None)
    assert out.next_token_logits[0].nonzero().flatten().tolist() == [7]
    first, second = sampler._text.row_params(batch, make_rows(torch.tensor([[7, 9]])))
    assert list(first["__req__"].output_ids) == [7]
    assert list(second["__req__"].output_ids) == [7, 9]


def test_rows_of_a_step_share_nothing():
    """Fails where a value that a processor stores in its parameters appears in another row or step."""
    sampler = make_row_sampler(None, VOCAB, 3)
    req = make_req("r", 0, VOCAB, processor=PROCESSOR, custom_params={"token_ids": [1]})
    batch = Batch([req], VOCAB)
    group = sampler.prefill(batch)
    sampler.commit_first(batch, group, torch.tensor([3]))
    verified = make_rows(torch.tensor([[3, 4, 5]]))
    rows = sampler._text.row_params(batch, verified)
    rows[0]["kept"] = 1
    rows[0]["__req__"].output_ids.append(9)
    again = sampler._text.row_params(batch, verified)
    assert [list(row["__req__"].output_ids) for row in rows[1:]] == [[3, 4], [3, 4, 5]]
    assert [list(row["__req__"].output_ids) for row in again] == [[3], [3, 4], [3, 4, 5]]
    assert not any("kept" in row for row in rows[1:] + again)
    assert "kept" not in req.sampling_params.custom_params


def test_parameters_that_are_no_dictionary_pass_as_they_are():
    """Fails where a request with a processor but without parameters raises, or gets another request's parameters."""
    sampler = make_row_sampler(None, VOCAB, 2)
    reqs = [
        make_req("bare", 0, VOCAB, processor=PROCESSOR),
        make_req("full", 1, VOCAB, processor=PROCESSOR, custom_params={"token_ids": [1]}),
    ]
    batch = Batch(reqs, VOCAB)
    group = sampler.prefill(batch)
    sampler.commit_first(batch, group, torch.tensor([3, 4]))
    rows = sampler._text.row_params(batch, make_rows(torch.tensor([[3, 5], [4, 6]])))
    assert rows[:2] == [None, None]
    assert [list(row["__req__"].output_ids) for row in rows[2:]] == [[4], [4, 6]]

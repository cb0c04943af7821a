"""Planned steps of our worker, as trees and chains of any shape: what is committed is what plain decoding gives."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_decoding import Asked
from planned_rig import Rig
from sglang.srt.layers import sampler as host_sampler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from stand_in_worker import BATCH, BLOCK, VOCAB, prefill_batch
from stand_ins import configured, make_req, one_rank

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.core.copying import Copying
from sglang_dflash.core.plan import Planner, PlanTuning
from sglang_dflash.core.policy import Drafting
from sglang_dflash.host import acceptance, planned_step, sampler, sampling
from sglang_dflash.host.hidden_states import ReturnedHiddenStates
from sglang_dflash.host.widths import LONGEST_COPY

SEEDED = {"enable_deterministic_inference": True}  # the host reads seeds only then


@pytest.fixture(autouse=True)
def _hooked(monkeypatch):
    """The host's sampler as on a server with our hooks, on a CPU."""
    monkeypatch.setattr(host_sampler, "murmur_hash32", ops.murmur_hash32)
    monkeypatch.setattr(planned_step, "mambaish_config", lambda config: None)
    filters = "top_k_top_p_min_p_sampling_from_probs_torch"
    monkeypatch.setattr(host_sampler, filters, partial(sampler.seeded_min_p, getattr(host_sampler, filters)))
    original = host_sampler.Sampler._sample_from_probs
    monkeypatch.setattr(
        host_sampler.Sampler, "_sample_from_probs", lambda *rest: sampler.sample_as_if_alone(original, *rest)
    )
    monkeypatch.setattr(host_sampler.Sampler, "_sync_token_ids_across_tp", lambda *_: None)  # one rank
    with one_rank(), torch.no_grad():
        yield


def ask(rng: random.Random, sampled: bool) -> Asked:
    """A request that may ask for anything."""
    sampling: dict[str, Any] = {"temperature": 0.0}
    if sampled and rng.random() < 0.8:
        sampling = {"temperature": rng.choice([0.5, 1.0, 1.4]), "sampling_seed": rng.randrange(1000)}
        filters = {"top_k": rng.randint(2, 20), "top_p": rng.uniform(0.5, 0.95), "min_p": 0.05}
        sampling |= {name: value for name, value in filters.items() if rng.random() < 0.3}
    penalties = {
        "frequency_penalty": rng.uniform(-1, 2),
        "presence_penalty": rng.uniform(-1, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
    }
    sampling |= {name: value for name, value in penalties.items() if rng.random() < 0.4}
    if rng.random() < 0.3:
        sampling |= {"min_new_tokens": rng.randrange(30), "stop_token_ids": rng.sample(range(VOCAB), 20)}
    if rng.random() < 0.3:
        sampling["logit_bias"] = {str(token): rng.uniform(-5, 5) for token in rng.sample(range(VOCAB), 9)}
    return Asked(
        sampling,
        tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))),
        grammar=rng.random() < 0.3,
        shift=rng.randrange(4) if rng.random() < 0.3 else None,
        top_logprobs=rng.choice([0, 0, 2, 3]),
        listed_ids=rng.random() < 0.3,
    )


GREEDY = {"temperature": 0.0}
PLAIN = [Asked(GREEDY, (5, 6, 7)), Asked(GREEDY, (9,)), Asked(GREEDY, (1, 2, 3, 4, 5))]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_trees_commit_plain_decoding(seed, page_size):
    """Fails where a plain greedy step commits another token than plain decoding, accepts less than it could, publishes
    too early, or leaves KV of either model at another slot than that of the token's position."""
    with configured():
        seen = Counter()
        for other in (seed, seed + 10, seed + 20):
            rig = Rig(other, PLAIN, page_size)
            rig.run()
            seen.update(rig.seen)
        assert all(seen.values()), seen


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(10))
def test_trees_honour_parameters(seed, page_size):
    """Fails where a row of a tree is penalised, masked, biased, seeded or processed as if other tokens than those of
    its path were emitted, or where logprobs or states do not follow the accepted path."""
    rng = random.Random(seed)
    with configured(**(SEEDED if seed % 2 else {})):
        rig = Rig(seed, [ask(rng, seed % 2 == 1) for _ in range(BATCH)], page_size, overlap=rng.random() < 0.5)
        rig.run()
        assert rig.seen["tree"] and rig.seen["reordered"], rig.seen


@pytest.mark.parametrize("seed", range(4))
def test_chains_of_different_lengths(seed):
    """Fails where a request of a step with fewer rows than another gets that one's parameters, rows or slots."""
    rng = random.Random(seed + 100)
    with configured(**(SEEDED if seed % 2 else {})):
        asked = [ask(rng, seed % 2 == 1) for _ in range(BATCH)] if seed else PLAIN
        rig = Rig(seed, asked, candidates=1, overlap=seed > 1)
        rig.run()
        assert not rig.seen["tree"] and rig.seen["deep"], rig.seen


@pytest.mark.parametrize("seed", range(2))
def test_a_draft_with_a_window(seed):
    """Fails where the draft's own table of the latest slots is filled for other requests than those that are drafted,
    or with the slots from before an exchange."""
    with configured():
        seen = Counter()
        for other in (seed, seed + 10):
            rig = Rig(other, PLAIN, window=8)
            rig.run()
            seen.update(rig.seen)
        assert seen["reordered"] and seen["not drafted"] and seen["copied"], seen


def test_copies_are_of_the_text_up_to_the_bonus():
    """Fails where the policy is shown another text than the request's own, or one that lacks the newest tokens."""
    shown: list[tuple[str, list[int]]] = []

    def see(texts: dict[str, Any]) -> None:
        shown.extend((name, [*text.prompt, *text.answer]) for name, text in texts.items())

    with configured():
        rig = Rig(0, PLAIN)
        rig.policy.copying = SimpleNamespace(see=see)
        for places in ([0, 1, 2], [1], [2, 0], [0, 1, 2]):
            expected = [(rig.running[place].req.rid, list(rig.running[place].text)) for place in places]
            rig.step(places)
            assert shown == expected
            shown.clear()


class Deciding(Planner):
    """The planner itself, which the rig can watch."""

    def __init__(self, copying: Copying, drafts: bool = True) -> None:
        ticks = itertools.count()
        tuning = PlanTuning(warm_up_steps=4, decision_steps=2)
        super().__init__(BLOCK, clock=lambda: next(ticks) * 1e-3, tuning=tuning, copying=copying, drafts=drafts)
        self.ended: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, *args: Any) -> Drafting:
        self.drafting = super().begin(*args)
        return self.drafting

    def choose(self, log_probs: torch.Tensor | None) -> ops.PlannedRows:
        self.trees = super().choose(log_probs)
        return self.trees

    def end(self, path: torch.Tensor, commit_lens: torch.Tensor) -> None:
        self.ended.append((path, commit_lens))
        super().end(path, commit_lens)


class Mixing(Copying):
    """Planted bug: every request copies the first one's text."""

    def offer(self, name: str) -> Any:
        first = next(iter(self._texts))
        self._texts[first] = self._texts[first]._replace(room=self._texts[name].room)
        return super().offer(first)


@pytest.mark.parametrize(
    ("copying", "page_size", "drafts"),
    [(Copying, 1, True), (Copying, 16, True), (Copying, 1, False), (Copying, 16, False), (Mixing, 1, True)],
)
def test_the_planner_copies(copying, page_size, drafts):
    """Fails where the planner copies nothing of texts that repeat themselves, or no more than a block holds, or a copy
    changes what is committed, be it another request's; or where the draft runs although it is turned off."""
    biased = [{str(token): 100.0 for token in tokens} for tokens in ((7,), (7, 9), (3, 4, 5))]
    texts = [Asked({**GREEDY, "logit_bias": bias}, (5, 6, place)) for place, bias in enumerate(biased)]
    with configured():
        seen, accepted, copies = Counter(), 0, 0
        for seed in range(3):
            rig = Rig(seed, texts, page_size)
            rig.policy = rig.worker.planned._policy = Deciding(copying(LONGEST_COPY, VOCAB), drafts)
            if not drafts:
                rig.worker._draft.runner.forward = None  # whoever calls it fails
            rig.run()
            seen.update(rig.seen)
            accepted += rig.policy.counts.copied_accepted
            copies += rig.policy.counts.copies
        if copying is Mixing:
            assert copies > 5, copies
        else:
            assert seen["copied"] > 5 and accepted > copies, (seen, accepted, copies)
            assert seen["longer than a block"], seen


@pytest.mark.parametrize(
    ("slots", "max_new_tokens", "answer", "newest", "room"),
    [
        (20, 100, [1], [], 19),  # beside the anchor's
        (20, 100, [1], [2, 3, 4], 16),
        (20, 12, [1], [], 10),  # with the token behind it, the 12th
        (20, 12, [1, 2], [3, 4], 7),
        (20, 3, [1], [2], 0),
        (8, 100, [1], [], 7),
    ],
)
def test_a_copy_has_room(slots, max_new_tokens, answer, newest, room):
    """Fails where a copy gets a row without a slot, or goes past the last token that is asked for."""
    req = make_req(output_ids=answer, max_new_tokens=max_new_tokens)
    req.kv.kv_committed_len, req.kv.kv_allocated_len = 30, 30 + slots
    assert planned_step._text_of(req, newest).room == room


def test_other_steps_interrupt_the_policy():
    """Fails where the policy does not learn that the server has prefilled, and how many rows of prompts, or where a
    plan makes the results of a prefill or an idle step differ from those of whole blocks."""
    with configured():
        rig = Rig(0, PLAIN)
        idle = SimpleNamespace(forward_mode=ForwardMode.IDLE)
        assert rig.worker.forward_batch_generation(idle).speculative_num_draft_tokens == BLOCK
        assert rig.policy.interrupts == [0]
        rig.worker._target_worker.forward_batch_generation = rig.prefill
        batch = prefill_batch()
        rig.worker.forward_batch_generation(batch)
        assert rig.policy.interrupts == [0, sum(batch.extend_lens)] and rig.policy.interrupts[1] > 0
        assert not rig.policy.ended
        rig.worker._prefill = lambda *_: None
        batch.forward_mode = ForwardMode.MIXED  # running requests' rows, too
        rig.worker.forward_batch_generation(batch)
        assert rig.policy.interrupts[2:] == [0]


# Planted bugs.


def _in_kernel(name: str, wrong: Any) -> Any:
    """Plants `wrong` in one of the chosen kernels."""

    def choose(original: Any, *arguments: Any) -> ops.Kernels:
        kernels = original(*arguments)
        owner = kernels if hasattr(kernels, name) else kernels.plans
        planted = replace(owner, **{name: partial(wrong, getattr(owner, name))})
        return planted if owner is kernels else replace(kernels, plans=planted)

    return choose


def _reversed(original: Any, *rest: Any) -> ops.TreeAcceptance:
    right = original(*rest)
    path = right.path.clone()
    for own, count in zip(path, right.commit_lens.tolist(), strict=True):
        own[1:count] = own[1:count].flip(0)
    return right._replace(path=path)


def _twice(original: Any, *rest: Any) -> None:
    original(*rest)
    original(*rest)


def _all_before(original: Any, rows: ops.PlannedRows) -> torch.Tensor:
    return torch.ones_like(original(rows)).tril()


def _in_order_of_rows(original: Any, out: Any, path: torch.Tensor) -> None:
    places = path[:, :1] + torch.arange(path.shape[1])
    original(out, places.clamp(max=len(out.next_token_logits) - 1))


def _as_a_chain(original: Any, plan: VerifyPlan) -> list[list[list[int]]]:
    ids = plan.ids.tolist()
    return [
        [ids[first + 1 : row + 1] for row in range(first, end)]
        for first, end in pairwise(plan.trees.row_starts.tolist())
    ]


def _at_the_rows_slots(original: Any, step: Any, batch: Any, plan: VerifyPlan, accepted: Any, *rest: Any) -> Any:
    hidden, positions, _ = original(step, batch, plan, accepted, *rest)
    committed = torch.arange(accepted.path.shape[1]) < accepted.commit_lens[:, None]
    return hidden, positions, plan.slots[accepted.path[committed]]


def _no_siblings(original: Any, plan: VerifyPlan) -> Any:
    children, siblings, ids = original(plan).resolve()
    return sampling.GrammarTree.from_host(children, torch.full_like(siblings, -1), ids)


def _position_of_the_row(original: Any, sampler: Any, batch: Any, plan: VerifyPlan, *rest: Any) -> Any:
    within = torch.arange(len(plan.ids)) - plan.trees.row_starts[plan.trees.requests]
    return original(sampler, batch, replace(plan, positions=plan.positions - plan.trees.depths + within), *rest)


def _of_other_requests(original: Any, drafting: Drafting, draft_ids: Any) -> Any:
    everyone, ids = original(drafting, draft_ids)
    return everyone, ids.roll(1, 0)


def _first_rows(original: Any, mask: Any, plan: VerifyPlan) -> Any:
    return type(mask)(mask.grammar, mask.vocab_mask[: len(plan.ids)])


PENALISED = {**GREEDY, "frequency_penalty": 1.5, "presence_penalty": 1.0}
SEEDS = [Asked({"temperature": 1.0, "sampling_seed": seed}, (5, 6, seed)) for seed in range(BATCH)]
PLANTED: dict[str, tuple[Any, str, Any, list[Asked], int]] = {
    "path in the wrong order": (ops, "choose_kernels", _in_kernel("accept_tree_greedy", _reversed), PLAIN, 16),
    "slots exchanged twice": (ops, "choose_kernels", _in_kernel("exchange_slots", _twice), PLAIN, 1),
    "KV not moved": (MHATokenToKVPool, "move_kv_cache", lambda *_: None, PLAIN, 16),
    "KV moved from the wrong end": (
        *(MHATokenToKVPool, "move_kv_cache", lambda original, pool, to, origin: original(pool, origin, to)),
        *(PLAIN, 16),
    ),
    "context KV at the rows' slots": (planned_step.PlannedStep, "commit", _at_the_rows_slots, PLAIN, 16),
    "states in the order of rows": (
        *(ReturnedHiddenStates, "put", lambda original, own, batch, out, path: original(own, batch, out)),
        *(PLAIN, 1),
    ),
    "candidates of other requests": (Drafting, "candidates", _of_other_requests, PLAIN, 1),
    "penalties of siblings": (ops.PlannedRows, "seen", _all_before, [Asked(PENALISED, (5, 6))] * BATCH, 1),
    "logprobs in the order of rows": (
        acceptance,
        "follow",
        _in_order_of_rows,
        [Asked(GREEDY, (5,), top_logprobs=2)],
        1,
    ),
    "processors see siblings": (VerifyPlan, "drafts", _as_a_chain, [Asked(GREEDY, (5, 6), shift=1)] * BATCH, 1),
    "grammar without siblings": (sampling, "_grammar_tree", _no_siblings, [Asked(GREEDY, (5,), grammar=True)], 1),
    "masks of other requests": (
        *(sampling, "_rows_of", _first_rows),
        *([Asked(GREEDY, (prompt,), grammar=True) for prompt in range(BATCH)], 1),
    ),
    "seeds by row": (sampling.RowSampler, "_sample", _position_of_the_row, SEEDS, 1),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug, monkeypatch):
    """Fails where this file could not fail."""
    owner, name, wrong, asked, page_size = PLANTED[bug]
    with configured(**(SEEDED if asked is SEEDS else {})):
        Rig(1, asked, page_size).run()
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *rest, **named: wrong(original, *rest, **named))
        with pytest.raises(AssertionError):
            Rig(1, asked, page_size).run()

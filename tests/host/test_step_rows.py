"""Steps of our worker that verify any rows: what is committed is what plain decoding gives."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_decoding import Asked
from rows_rig import Rig
from sglang.srt.layers import sampler as host_sampler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from stand_in_worker import BATCH, BLOCK, VOCAB, prefill_batch
from stand_ins import configured, one_rank

from sglang_cpu.ops import murmur_hash32
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.patches import sampler
from sglang_dflash.host.worker import acceptance, sampling
from sglang_dflash.host.worker.emitted_text import EmittedText
from sglang_dflash.host.worker.hidden_states import ReturnedHiddenStates
from sglang_dflash.host.worker.worker import DFlashWorker

SEEDED = {"enable_deterministic_inference": True}  # the host reads seeds only then


@pytest.fixture(autouse=True)
def _hooked(monkeypatch):
    """The host's sampler as on a server with our hooks, on a CPU."""
    monkeypatch.setattr(host_sampler, "murmur_hash32", murmur_hash32)
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
def test_greedy_rows_commit_plain_decoding(seed, page_size):
    """Fails where a plain greedy step commits another token than plain decoding, accepts less than it could, publishes
    too early, or leaves KV of either model at another slot than that of the token's position."""
    with configured():
        seen = Counter()
        for other in (seed, seed + 10, seed + 20):
            rig = Rig(other, PLAIN, page_size)
            rig.run()
            seen.update(rig.seen)
        assert all(seen.values()), seen


@pytest.mark.parametrize("seed", range(12))
def test_rows_honour_parameters(seed):
    """Fails where a row is penalised, masked, biased, seeded or processed as if other tokens than those before it were
    emitted, or as another request asks; or where logprobs or states are another row's."""
    rng = random.Random(seed)
    with configured(**(SEEDED if seed % 2 else {})):
        asked = [ask(rng, seed % 2 == 1) for _ in range(BATCH)]
        rig = Rig(seed, asked, rng.choice([1, 16]), overlap=rng.random() < 0.5)
        rig.run()
        assert rig.seen["ragged"] and rig.seen["deep"], rig.seen


@pytest.mark.parametrize("seed", range(2))
def test_a_draft_with_a_window(seed):
    """Fails where the draft's own table of the latest slots is filled for other requests than those that are
    drafted."""
    with configured():
        seen = Counter()
        for other in (seed, seed + 10):
            rig = Rig(other, PLAIN, window=8)
            rig.run()
            seen.update(rig.seen)
        assert seen["ragged"] and seen["not drafted"], seen


def test_other_steps_interrupt_the_clock():
    """Fails where a prefill counts as a part of a step's time, or where rows make the results of a prefill or an idle
    step differ from those of whole blocks."""
    with configured():
        rig = Rig(0, PLAIN)
        rig.step([0, 1, 2])
        idle = SimpleNamespace(forward_mode=ForwardMode.IDLE)
        assert rig.worker.forward_batch_generation(idle).speculative_num_draft_tokens == BLOCK
        clock = rig.worker.step_rows._clock
        assert clock._drafted is None
        rig.step([0, 1])
        assert clock._drafted is not None
        rig.worker._target_worker.forward_batch_generation = rig.prefill
        rig.worker.forward_batch_generation(prefill_batch())
        assert clock._drafted is None


# Planted bugs.


def past_its_rows(original: Any, acceptor: Any, rows: VerifyRows, *rest: Any) -> Any:
    """Where all verified rows are accepted, one token more is committed."""
    accepted, group = original(acceptor, rows, *rest)
    for request, count in enumerate((rows.chains() >= 0).sum(1).tolist()):
        if accepted.commit_lens[request] == count < rows.width:
            accepted.out_ids[request, count] = accepted.bonus_ids[request]
            accepted.commit_lens[request] += 1
    return accepted, group


def _neighbours(original: Any, rows: VerifyRows, values: torch.Tensor) -> torch.Tensor:
    return original(rows, values if rows.chosen is None else values.roll(1, 0))


def _of_all_places(original: Any, worker: Any, rows: VerifyRows, kv_plan: Any) -> torch.Tensor:
    """Context KV at the first slots of the blocks, whichever rows were verified."""
    return worker._draft.slots_of(kv_plan)[: len(rows.ids)]


def _first_rows(original: Any, mask: Any, rows: VerifyRows) -> Any:
    return type(mask)(mask.grammar, mask.vocab_mask[: len(rows.ids)])


def _without_drafts(original: Any, text: EmittedText, req: Any, params: Any, drafts: list[int]) -> Any:
    return original(text, req, params, [])


def _position_of_the_anchor(original: Any, sampler: Any, batch: Any, rows: VerifyRows, *rest: Any) -> Any:
    positions = rows.blocks(rows.positions)[:, :1].expand(-1, rows.width)
    positions = positions.flatten() if rows.chosen is None else positions.flatten()[rows.chosen.kept]
    return original(sampler, batch, replace(rows, positions=positions), *rest)


PENALISED = {**GREEDY, "frequency_penalty": 1.5, "presence_penalty": 1.0}
SEEDS = [Asked({"temperature": 1.0, "sampling_seed": seed}, (5, 6, seed)) for seed in range(BATCH)]
PLANTED: dict[str, tuple[Any, str, Any, list[Asked]]] = {
    "a commit past the verified rows": (acceptance.Acceptor, "accept", past_its_rows, PLAIN),
    "tokens of a neighbour's row": (VerifyRows, "blocks", _neighbours, PLAIN),
    "KV of unverified rows": (DFlashWorker, "_slots", _of_all_places, PLAIN),
    "states in the order of rows": (
        *(ReturnedHiddenStates, "put", lambda original, own, batch, out, **_: original(own, batch, out)),
        PLAIN,
    ),
    "logprobs in the order of rows": (
        acceptance,
        "in_blocks",
        lambda *_: None,
        [Asked(GREEDY, (5,), top_logprobs=2)] * 3,
    ),
    "processors see no drafts": (EmittedText, "_params", _without_drafts, [Asked(GREEDY, (5, 6), shift=1)] * BATCH),
    "masks of other requests": (
        *(sampling, "_rows_of", _first_rows),
        [Asked(GREEDY, (prompt,), grammar=True) for prompt in range(BATCH)],
    ),
    "penalties of a neighbour": (
        *(VerifyRows, "blocks", _neighbours),
        [Asked(PENALISED, (5, 6))] * BATCH,
    ),
    "seeds by the anchor": (sampling.RowSampler, "_sample", _position_of_the_anchor, SEEDS),
}


def check_finding(
    rig: type[Rig], owner: Any, name: str, wrong: Any, asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rig's steps fail with `wrong` around the function `name` of `owner`, and not without it."""
    with configured(**(SEEDED if asked is SEEDS else {})):
        rig(1, asked).run()
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *rest, **named: wrong(original, *rest, **named))
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            rig(1, asked).run()


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug, monkeypatch):
    """Fails where this file could not fail."""
    check_finding(Rig, *PLANTED[bug], monkeypatch)

"""Steps that verify copied tokens beside drafts: what is committed is what plain decoding gives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from plain_decoding import Asked
from rows_rig import Rig, Running
from sglang.srt.layers import sampler as host_sampler
from stand_in_worker import BLOCK, VOCAB
from stand_ins import configured, one_rank

from sglang_dflash import ops
from sglang_dflash.core.copies import Offer
from sglang_dflash.host.worker.copied_rows import CopiedRows

GREEDY = {"temperature": 0.0}
PLAIN = [Asked(GREEDY, (5, 6, 7)), Asked(GREEDY, (9,)), Asked(GREEDY, (1, 2, 3, 4, 5))]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(host_sampler.Sampler, "_sync_token_ids_across_tp", lambda *_: None)
    with one_rank(), configured(), torch.no_grad():
        yield


class CopyingRig(Rig):
    """Its requests are offered the right tokens mostly, as if they stood in their texts."""

    def __init__(self, seed: int, asked: list[Asked], page_size: int = 1) -> None:
        super().__init__(seed, asked, page_size)
        target, kernels = self.worker._target, ops.choose_kernels("cpu", torch.float32)
        self.rows = CopiedRows(BLOCK, self.policy, target, self.worker._draft, VOCAB - 1, kernels)
        self.worker.step_rows, self.rows._copies = self.rows, self
        events = ("copied", "copied far", "beside drafts", "nothing but copies", "a whole copy", "cut")
        self.seen |= dict.fromkeys(events, 0)

    def offers(self, texts: Any) -> list[Offer | None]:
        """In the place of `Copies`."""
        by_name = {one.req.rid: one for one in self.running}
        for text in texts:  # the scheduler's lists, up to the pending bonus
            assert (*text.prompt, *text.answer) == by_name[text.name].text
        return [self._offer(by_name[text.name]) if self.rng.random() < 0.7 else None for text in texts]

    def _offer(self, one: Running) -> Offer:
        ids = [one.plain(depth).token for depth in range(1, self.rng.randint(2, BLOCK))]
        ids = [token if self.rng.random() < 0.85 else self.rng.randrange(VOCAB) for token in ids]
        return Offer(ids, [0.9**depth for depth in range(1, 1 + len(ids))])

    def _note(self, chosen: list[Running], lens: list[int]) -> None:
        super()._note(chosen, lens)
        copied = self.rows._copied
        assert not set(copied) & set(self.policy.drafting.requests)
        assert self.rows.counts.copied == self.seen["copied"] + sum(lens[place] - 1 for place in copied)
        for place, offer in copied.items():
            self.seen["copied"] += lens[place] - 1
            self.seen["beside drafts"] += lens[place] > 1 and bool(self.policy.drafting.requests)
            self.seen["nothing but copies"] += lens[place] > 1 and not self.policy.drafting.requests
            self.seen["a whole copy"] += self.lens[place] == BLOCK
            self.seen["copied far"] += lens[place] > 3
            self.seen["cut"] += 1 < self.lens[place] <= len(offer.ids)


@pytest.mark.parametrize("page_size", [1, 16])
def test_copies_commit_plain_decoding(page_size):
    """Fails where a step with copies commits another token than plain decoding, accepts less than it could, leaves KV
    of either model at a wrong slot, or miscounts; where copies do not get the text up to the pending bonus; or where a
    drafted request's rows are those of its copy."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        rig = CopyingRig(seed, PLAIN, page_size)
        rig.run()
        seen.update(rig.seen)
    assert all(seen.values()), seen


@pytest.mark.parametrize("seed", range(3))
def test_copies_honour_parameters(seed):
    """Fails where a copied row is penalised or masked as if other tokens than those before it were emitted."""
    penalised = {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.4}
    asked = [Asked(penalised, (5, 6, 7)), Asked(GREEDY, (9,), grammar=True), Asked(penalised, (1, 2), grammar=True)]
    rig = CopyingRig(seed, asked)
    rig.run()
    assert rig.seen["copied"], rig.seen


def test_a_copy_at_a_wrong_place_is_found(monkeypatch):
    """Fails where this file could not: with each copied token, but for the first, a row too far on."""
    original = CopiedRows._rows_to_verify

    def shifted(rows: CopiedRows, *arguments: Any) -> Any:
        rows._copied = {at: one._replace(ids=[*one.ids[:1], *one.ids[:-1]]) for at, one in rows._copied.items()}
        return original(rows, *arguments)

    def copied_far() -> int:
        rigs = [CopyingRig(seed, PLAIN) for seed in range(8)]
        for rig in rigs:
            rig.run()
        return sum(rig.seen["copied far"] for rig in rigs)

    assert copied_far() > 3
    monkeypatch.setattr(CopiedRows, "_rows_to_verify", shifted)
    assert copied_far() == 0

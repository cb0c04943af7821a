"""Rows of copied tokens beside those of drafts (SGLANG_DFLASH_COPIES=1), on a CPU without overlap scheduling."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_dflash.core.block import Block, VerifyRows
from sglang_dflash.core.copies import Copies, Offer, Text
from sglang_dflash.core.policy import CopyingPolicy, Drafting
from sglang_dflash.host.worker.protocols import ModelRunner, ScheduleBatch
from sglang_dflash.host.worker.rows import StepRows, trimmed


class CopiedRows(StepRows):
    """The chain of a request that is not drafted is its copy, if it has one; one rule chooses among all rows.

    The texts end with the pending bonus: without overlap, SGLang has handled the step before. So a copy depends on
    the prefix alone, as a draft does.
    """

    policy: CopyingPolicy

    def __init__(self, block_size: int, policy: CopyingPolicy, target_runner: ModelRunner, *parts: Any) -> None:
        """parts: see `StepRows`."""
        super().__init__(block_size, policy, target_runner, *parts)
        self._copies = Copies(block_size - 1, target_runner.model_config.vocab_size)
        self._copied: dict[int, Offer] = {}  # by place, those of this step
        self._verified = np.empty(0, dtype=int)  # rows of each request, where there are copies

    def _decide(self, batch: ScheduleBatch) -> Drafting:
        offers = self._copies.offers([Text(req.rid, req.origin_input_ids, req.output_ids) for req in batch.reqs])
        found = {place: offer for place, offer in enumerate(offers) if offer is not None}
        survival = np.zeros((len(offers), self._block_size - 1))
        for place, offer in found.items():
            survival[place, : len(offer.ids)] = offer.survival
        drafting = self.policy.draft(self._names, survival)
        self._copied = {place: offer for place, offer in found.items() if place not in drafting.requests}
        return drafting

    def _width(self) -> int:
        return self._block_size if self._copied else super()._width()

    def _rows_to_verify(self, block: Block, kv_plan: Any, batch: ScheduleBatch) -> VerifyRows:
        if not self._copied:
            return super()._rows_to_verify(block, kv_plan, batch)
        drafted, width = self._drafting.requests, self._drafting.width
        ids, survival = block.ids.clone(), np.empty((0, width - 1))
        if drafted:
            ids[:, :width], weighed = self._draft_ids(block.first(width), kv_plan, batch)
            assert weighed is not None
            survival = weighed
        for place, offer in self._copied.items():
            ids[place, 1 : 1 + len(offer.ids)] = torch.tensor(offer.ids)
        self._verified = self.policy.verify_all(survival)
        if drafted:
            self._weighed = survival, self._verified[drafted]
        return trimmed(block, ids, torch.from_numpy(self._verified))

    def learn(self, rows: VerifyRows, commit_lens: torch.Tensor) -> None:
        places = list(self._copied)
        if places:
            self.counts.add_copies(self._verified[places], commit_lens.numpy()[places])
        super().learn(rows, commit_lens)

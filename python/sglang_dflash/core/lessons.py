"""Keeps what drafted steps have shown until calibration, memory of drafts and counts take it in."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_dflash import ops
from sglang_dflash.core.calibration import Calibration, Verified
from sglang_dflash.core.depth_tally import DepthTally
from sglang_dflash.core.draft_memory import DraftMemory
from sglang_dflash.core.plan_counts import PlanCounts
from sglang_dflash.core.policy import Drafting


class DraftedStep(NamedTuple):
    """What a drafted step shows.

    Fields:
        requests: names of all B.
        drafting: for b of them.
        log_probs: [b, D, k]; of the draft.
        chosen: what was verified.
        path, commit_lens: of all requests; see `ops.TreeAcceptance`.
    """

    requests: list[str]
    drafting: Drafting
    log_probs: torch.Tensor
    chosen: ops.ChosenRows
    path: torch.Tensor
    commit_lens: torch.Tensor


class Lessons:
    """Several steps together cost little more than one: the code of learning has to come into the processor's caches,
    which the model's weights have filled."""

    def __init__(self, calibration: Calibration, memory: DraftMemory, counts: PlanCounts) -> None:
        self._calibration, self._memory, self._counts = calibration, memory, counts
        self._tally = DepthTally(counts)
        self._steps: list[DraftedStep] = []

    def add(self, step: DraftedStep) -> None:
        self._steps.append(step)

    def learn(self) -> None:
        """Takes in the steps since the last call."""
        if not self._steps:
            return
        offered, verified = [], []
        for requests, drafting, log_probs, chosen, path, commit_lens in self._steps:
            drafted, rows = drafting.requests, chosen.rows
            names = [requests[i] for i in drafted]
            offered.append((names, chosen))
            if rows.width > 1:
                verified.append(Verified(names, drafted, rows, path, log_probs))
            if drafting.copies:
                commit_lens = commit_lens[drafted]
            lens = [rows.lens[i] for i in drafted]
            self._counts.chose(lens, chosen.depth, chosen.promised)
            self._counts.accepted += sum(commit_lens.tolist()) - len(commit_lens)
            self._tally.add(chosen.trees, lens, commit_lens)
        self._steps.clear()
        self._memory.keep(offered)
        self._calibration.observe(verified)

    def settle(self) -> None:
        """Learns, and brings the counts by depth up to date."""
        self.learn()
        self._tally.settle()

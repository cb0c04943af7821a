"""Under tensor parallelism all ranks follow the first rank's rows: their own would differ, as their clocks do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_dflash.core.policy import Drafting, Policy, Step, StepSeconds


class SharedPolicy:
    """A `Policy` that asks another one on the first rank alone, and sends its answers to the others.

    All ranks call it with the same requests. A step takes one exchange; one that drafts anything takes two on CUDA and
    three on a CPU.
    """

    def __init__(self, policy: Policy, group: Any) -> None:
        """group: SGLang's `GroupCoordinator` of the ranks."""
        self.weighs = policy.weighs
        self._policy = policy if group.rank_in_group == 0 else None
        self._group = group

    def _shared(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's values; of the same shape and dtype on all ranks."""
        torch.distributed.broadcast(values, src=self._group.ranks[0], group=self._group.cpu_group)
        return values

    def draft(self, names: Sequence[str]) -> Drafting:
        sent = torch.zeros(2 + len(names), dtype=torch.int64)  # width, rows, then whether each request is drafted
        if self._policy is not None:
            drafting = self._policy.draft(names)
            sent[0], sent[1] = drafting.width, drafting.rows
            sent[2:][drafting.requests] = 1
        width, rows, *drafted = self._shared(sent).tolist()
        return Drafting(width, [place for place, own in enumerate(drafted) if own], rows)

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        sent = torch.zeros(len(names), depths)
        if self._policy is not None:
            sent = torch.from_numpy(self._policy.offsets(names, depths))
        return self._shared(sent).numpy()

    def verify(self, survival: np.ndarray) -> np.ndarray:
        sent = torch.zeros(len(survival), dtype=torch.int64)
        if self._policy is not None:
            sent = torch.from_numpy(self._policy.verify(survival))
        return self._shared(sent).numpy()

    def learn(self, step: Step) -> None:
        if self._policy is not None:
            self._policy.learn(step)

    def see_draft(self, rows: int, seconds: float) -> None:
        if self._policy is not None:
            self._policy.see_draft(rows, seconds)

    def see_rest(self, rows: int, seconds: float) -> None:
        if self._policy is not None:
            self._policy.see_rest(rows, seconds)

    def step_seconds(self) -> StepSeconds | None:
        """On the first rank, which `/server_info` asks."""
        return None if self._policy is None else self._policy.step_seconds()

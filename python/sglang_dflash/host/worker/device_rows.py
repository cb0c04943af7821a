"""Rows on CUDA: the CPU chooses a step's width, by what it has read of earlier steps, so that no step waits for the
device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyRows
from sglang_dflash.core.policy import Step
from sglang_dflash.host.worker.device_readings import Readback
from sglang_dflash.host.worker.draft_input import upload
from sglang_dflash.host.worker.protocols import ScheduleBatch
from sglang_dflash.host.worker.rows import Proposed, StepRows, Timed


class DeviceRows(StepRows):
    """All requests of a step are drafted, or none, and all rows of their blocks are verified."""

    def __init__(self, *parts: Any) -> None:
        """To be constructed before graphs are captured. parts: see `StepRows`."""
        super().__init__(*parts)
        self._device = torch.device(self._target.device)
        self._readback: Readback[list[str]] = Readback(self._device)
        self._chosen: tuple[torch.Tensor, torch.Tensor] | None = None  # survival and lens of this step's blocks

    def propose(self, batch: ScheduleBatch) -> Proposed:
        for names, values in self._readback.arrived():
            survival, lens, commit_lens = np.split(values.numpy(), [-2, -1], axis=1)
            self._learn(Step(names, survival, lens[:, 0].astype(int), commit_lens[:, 0].astype(int)))
        self._begin(batch)
        self._chosen = None
        block = self.lay_out(batch, self._block_width())
        kv_plan = self.plan_kv(block, batch)
        drafted = block.ids.numel() if self._drafting.width > 1 else 0
        rows = self._draft_block(block, kv_plan, batch) if drafted else self._plain(block)
        self._clock.drafted(Timed(drafted, self._size(rows)))
        return Proposed(rows, kv_plan)

    def _draft_block(self, block: Block, kv_plan: Any, batch: ScheduleBatch) -> VerifyRows:
        draft_ids, log_probs = self._propose_all(block, kv_plan, batch)
        ids = torch.cat((block.ids[:, :1], draft_ids), dim=1)
        offsets = upload(torch.from_numpy(self.policy.offsets(self._names, block.width - 1)), self._device)
        assert log_probs is not None
        survival = ops.survival(log_probs, offsets)
        rows = self._verified(block, ids, survival)
        self._chosen = survival, self._lens(rows)
        return rows

    def _block_width(self) -> int:
        """Rows of a block of this step."""
        return self._drafting.width

    def _plain(self, block: Block) -> VerifyRows:
        """Where nobody is drafted."""
        return VerifyRows.of(block, block.ids)

    def _verified(self, block: Block, ids: torch.Tensor, survival: torch.Tensor) -> VerifyRows:
        """The rows of drafted blocks that are verified. ids: [B, W]; survival: [B, W - 1]."""
        return VerifyRows.of(block, ids)

    def _size(self, rows: VerifyRows) -> int:
        """Rows of the target's forward."""
        return len(rows.ids)

    def learn(self, rows: VerifyRows, commit_lens: torch.Tensor) -> None:
        if self._chosen is not None:
            survival, lens = self._chosen
            self._readback.send(self._names, torch.cat((survival, lens[:, None], commit_lens[:, None]), dim=1))
        super().learn(rows, commit_lens)

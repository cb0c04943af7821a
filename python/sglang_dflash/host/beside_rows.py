"""Whole blocks whose verify forward is prepared beside the draft's (SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.core.block import VerifyPlan
from sglang_dflash.host.plan_stream import PlanStream
from sglang_dflash.host.protocols import ForwardBatch, ScheduleBatch
from sglang_dflash.host.rows import Proposed, StepRows


class BesideRows(StepRows):
    """Whole blocks, whose verify forward is prepared beside the draft's: only the ids depend on the draft.

    The forward batch is prepared with the block's masks, and the drafts then take their places in the same tensor. The
    graph runner copies ids and positions once more at replay.
    """

    prepare: Callable[[VerifyPlan, ScheduleBatch, Any], ForwardBatch] | None = None
    """Gives the target's forward batch over rows, from the host's KV plan. None: the forward prepares itself."""
    _stream: PlanStream | None = None

    def propose(self, batch: ScheduleBatch) -> Proposed:
        if self.prepare is None or self._target.decode_cuda_graph_runner is None:
            return super().propose(batch)
        if self._stream is None:
            self._stream = PlanStream(self._target.device)
        self._begin(batch)
        block = self.lay_out(batch, self._drafting.width)
        kv_plan = self.plan_kv(block, batch)
        self._stream.mark()
        draft_ids, _ = self._propose_all(block, kv_plan, batch)
        plan = VerifyPlan.of(block, block.ids)
        with self._stream.work():
            forward_batch = self.prepare(plan, batch, kv_plan)
        self._stream.join()
        plan.chains()[:, 1:].copy_(draft_ids)
        return Proposed(plan, kv_plan, forward_batch)

"""Whole blocks whose verify forward is prepared beside the draft's (SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1)."""

from __future__ import annotations

from sglang_dflash.core.block import VerifyRows
from sglang_dflash.host.worker.plan_stream import PlanStream
from sglang_dflash.host.worker.protocols import ScheduleBatch
from sglang_dflash.host.worker.rows import Prepare, Proposed, StepRows


class BesideRows(StepRows):
    """Whole blocks, whose verify forward is prepared beside the draft's: only the ids depend on the draft.

    The forward batch is prepared with the block's masks, and the drafts then take their places in the same tensor. The
    graph runner copies ids and positions once more at replay.
    """

    _prepare: Prepare | None = None
    _stream: PlanStream | None = None

    def use_graphs(self, prepare: Prepare) -> None:
        self._prepare = prepare

    def propose(self, batch: ScheduleBatch) -> Proposed:
        if self._prepare is None or self._target.decode_cuda_graph_runner is None:
            return super().propose(batch)
        if self._stream is None:
            self._stream = PlanStream(self._target.device)
        self._begin(batch)
        block = self.lay_out(batch, self._drafting.width)
        kv_plan = self.plan_kv(block, batch)
        self._stream.mark()
        draft_ids, _ = self._propose_all(block, kv_plan, batch)
        rows = VerifyRows.of(block, block.ids)
        with self._stream.work():
            forward_batch = self._prepare(rows, batch, kv_plan)
        self._stream.join()
        rows.chains()[:, 1:].copy_(draft_ids)
        return Proposed(rows, kv_plan, forward_batch)

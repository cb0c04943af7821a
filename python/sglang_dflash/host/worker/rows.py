"""Proposes the rows of each step: asks the policy whom to draft, runs the draft, and lays out what is verified."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.speculative.spec_utils import spec_stage_span

from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyRows
from sglang_dflash.core.policy import Drafting, Policy, Step
from sglang_dflash.core.row_counts import RowCounts
from sglang_dflash.host.worker.device_readings import StepClock
from sglang_dflash.host.worker.draft_input import known_kv_lens
from sglang_dflash.host.worker.draft_runner import DraftRunner
from sglang_dflash.host.worker.protocols import ForwardBatch, ModelRunner, ScheduleBatch
from sglang_dflash.host.worker.row_report import RowReport
from sglang_dflash.host.worker.width_graphs import WidthGraphs

Prepare = Callable[[VerifyRows, ScheduleBatch, Any], ForwardBatch]


class Proposed(NamedTuple):
    """What a step verifies.

    Fields:
        kv_plan: SGLang's `KVLocPlan` over the slots of all blocks.
        forward_batch: the target's, if it is prepared already.
    """

    rows: VerifyRows
    kv_plan: Any
    forward_batch: ForwardBatch | None = None


class Timed(NamedTuple):
    """Rows of a step whose times are measured: of the draft, 0 if it did not run, and of the target."""

    drafted: int
    verified: int


class StepRows:
    """The rows of a step. A policy that weighs needs a device whose values the CPU may read at once: a CPU.

    graphs: of the widths that steps have; None: SGLang's own serve all steps.
    """

    graphs: WidthGraphs | None = None

    def __init__(
        self,
        block_size: int,
        policy: Policy,
        target_runner: ModelRunner,
        draft: DraftRunner,
        mask_token_id: int,
        kernels: ops.Kernels,
        report: Callable[[RowCounts], RowReport] | None = None,
    ) -> None:
        """block_size: K. report: of a policy that weighs."""
        self._block_size, self.policy, self._target, self._draft = block_size, policy, target_runner, draft
        self._mask_token_id, self._kernels = mask_token_id, kernels
        self._clock: StepClock[Timed] = StepClock(target_runner.device)
        self.counts = RowCounts()
        self.report = None if report is None else report(self.counts)
        self._names: list[str] = []
        self._drafting = Drafting(1, [], 0)
        if policy.weighs:
            draft.weigh_drafts()
        self._weighed: tuple[np.ndarray, np.ndarray] | None = None  # survival and lens of this step's blocks

    @property
    def widths(self) -> list[int]:
        """W of all steps."""
        return [self._block_size] if self.graphs is None else self.graphs.widths

    def use_graphs(self, prepare: Prepare) -> None:
        """To be called when SGLang has captured the graphs of width K. prepare: gives the target's forward batch over
        rows, from SGLang's KV plan."""
        if self.graphs is not None:
            self.graphs.capture()

    def warm_up(self) -> None:
        """Compiles what a first step would otherwise wait for."""

    def interrupt(self) -> None:
        """Something other than a decode step runs. Graphs of prefills are made over SGLang's own attention."""
        self._clock.interrupt()
        if self.graphs is not None:
            self.graphs.use(self._block_size)

    def propose(self, batch: ScheduleBatch) -> Proposed:
        """Runs the draft where it pays."""
        self._begin(batch)
        block = self.lay_out(batch, self._width())
        kv_plan = self.plan_kv(block, batch)
        rows = self._rows_to_verify(block, kv_plan, batch)
        if self.policy.weighs:
            self._clock.drafted(Timed(len(self._drafting.requests) * self._drafting.width, len(rows.ids)))
        return Proposed(rows, kv_plan)

    def _begin(self, batch: ScheduleBatch) -> None:
        """Lets the policy learn from the times of earlier steps, and decide whom this one drafts."""
        if self.policy.weighs:
            self._clock.begin()
            for timed, draft_s, rest_s in self._clock.readings():
                if timed.drafted:
                    self.policy.see_draft(timed.drafted, draft_s)
                self.policy.see_rest(timed.verified, rest_s)
        self._names, self._weighed = [req.rid for req in batch.reqs], None
        self._drafting = self._decide(batch)
        if self.graphs is not None:
            self.graphs.use(self._drafting.width)

    def _decide(self, batch: ScheduleBatch) -> Drafting:
        return self.policy.draft(self._names)

    def _width(self) -> int:
        """W of the step's blocks."""
        return self._drafting.width

    def _rows_to_verify(self, block: Block, kv_plan: Any, batch: ScheduleBatch) -> VerifyRows:
        if block.width == 1:
            return VerifyRows.of(block, block.ids)
        ids, survival = self._draft_ids(block, kv_plan, batch)
        if survival is None:
            return VerifyRows.of(block, ids)
        self._weighed = survival, self.policy.verify(survival)
        lens = torch.ones(len(ids), dtype=torch.int64)
        lens[self._drafting.requests] = torch.from_numpy(self._weighed[1])
        return trimmed(block, ids, lens)

    def _draft_ids(self, block: Block, kv_plan: Any, batch: ScheduleBatch) -> tuple[torch.Tensor, np.ndarray | None]:
        """Runs the draft. [B, W] int64: the block's ids with the drafts; and [b, W - 1]: the survival of those that are
        drafted, for a policy that weighs."""
        drafted = self._drafting.requests
        if len(drafted) == len(batch.reqs):
            draft_ids, log_probs = self._propose_all(block, kv_plan, batch)
            ids = torch.cat((block.ids[:, :1], draft_ids), dim=1)
        else:
            some = torch.tensor(drafted)
            own = block.of(some)
            own = own.first(self._draft.rows_of(own.width))
            kv_lens = own.prefix_lens + own.width
            own_plan = self.plan_kv(own, batch, own.prefix_lens)
            with spec_stage_span("draft"):
                draft_ids, log_probs = self._draft.propose(own, own_plan, (kv_lens, int(kv_lens.sum())), False)
            ids = block.ids.clone()
            ids[some, 1:] = draft_ids
        if not self.policy.weighs:
            return ids, None
        assert log_probs is not None
        offsets = self.policy.offsets([self._names[place] for place in drafted], block.width - 1)
        return ids, ops.survival(log_probs, torch.from_numpy(offsets)).numpy()

    def _propose_all(
        self, block: Block, kv_plan: Any, batch: ScheduleBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafts of all requests of the batch, by a graph where there is one."""
        rows = self._draft.rows_of(block.width)
        if rows < block.width:
            block = block.first(rows)
            kv_plan = self.plan_kv(block, batch)
        kv_lens = known_kv_lens(batch, rows)
        with spec_stage_span("draft"):
            return self._draft.propose(block, kv_plan, kv_lens, batch.can_run_decode_cuda_graph)

    def lay_out(self, batch: ScheduleBatch, width: int) -> Block:
        """A block of `width` rows for each request."""
        prefix_lens, requests = batch.seq_lens, batch.req_pool_indices
        table = self._target.req_to_token_pool.req_to_token
        bonus_ids = batch.spec_info.bonus_tokens
        rows = self._kernels.block_layout(bonus_ids, prefix_lens, requests, table, width, self._mask_token_id)
        return Block(*rows, prefix_lens, requests)

    def plan_kv(self, block: Block, batch: ScheduleBatch, lens_cpu: torch.Tensor | None = None) -> Any:
        """SGLang's plan of KV ids of a block's slots, shared by draft, verify and commit.

        lens_cpu: [b] int64; the prefix lengths as SGLang knows them; None: those of the batch.
        """
        return self._target.kv_index_translator.plan(
            req_pool_indices=block.req_pool_indices,
            seq_lens=block.prefix_lens,
            seq_lens_cpu=known_kv_lens(batch, 0)[0] if lens_cpu is None else lens_cpu,
            write_virtual=block.slots.flatten(),
            read_extent=block.width,
        )

    def verify_fields(self, rows: VerifyRows) -> dict[str, Any]:
        """Fields of the target's `RaggedVerifyInput` that say which rows of the blocks are verified."""
        return {} if rows.chosen is None else {"lens": rows.chosen.lens, "kv_loc_cols": rows.chosen.kept}

    def committed(
        self,
        rows: VerifyRows,
        accepted: ops.TreeAcceptance | ops.GreedyAcceptance,
        hidden: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states of the target's tapped layers, positions and slots of the rows whose draft KV is to be written.

        hidden: [T or more, taps * H]; slots: [T] int64, of the draft's pool.
        """
        return hidden, rows.positions, slots

    def cap_lens(self, rows: VerifyRows) -> torch.Tensor | None:
        """[B] int32: the rows of each request, which SGLang counts; None where all steps verify whole blocks."""
        if not self.policy.weighs and rows.width == self._block_size:
            return None
        return self._lens(rows)

    def _lens(self, rows: VerifyRows) -> torch.Tensor:
        """[B] int32: the rows of each request."""
        return self._same_lens(rows.batch, rows.width) if rows.chosen is None else rows.chosen.lens

    def _same_lens(self, requests: int, lens: int) -> torch.Tensor:
        """[B] int32; shared, so nobody writes to it."""
        return _same_lens(requests, lens, self._target.device)

    def learn(self, rows: VerifyRows, commit_lens: torch.Tensor) -> None:
        """The step is over. commit_lens: [B] int32."""
        if self._weighed is not None:
            names = [self._names[place] for place in self._drafting.requests]
            self._learn(Step(names, *self._weighed, commit_lens.numpy()[self._drafting.requests]))
        self.counts.steps += 1
        if self.report is not None:
            self.report.step()

    def _learn(self, step: Step) -> None:
        self.policy.learn(step)
        self.counts.add(step)


def trimmed(block: Block, ids: torch.Tensor, lens: torch.Tensor) -> VerifyRows:
    """The first rows of each block. ids: [B, W] int64; lens: [B] int64."""
    total = int(lens.sum())
    return VerifyRows.of(block, ids, None if total == ids.numel() else ops.keep_rows(lens, block.width, total))


@lru_cache(maxsize=256)
def _same_lens(requests: int, lens: int, device: Any) -> torch.Tensor:
    return torch.full((requests,), lens, dtype=torch.int32, device=device)

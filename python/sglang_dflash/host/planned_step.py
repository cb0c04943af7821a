"""A planned step on a CPU: rows where they pay, in trees or chains of different lengths, instead of whole blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import spec_stage_span

from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyPlan
from sglang_dflash.core.copying import Text
from sglang_dflash.core.policy import Policy
from sglang_dflash.host import widths
from sglang_dflash.host.draft_input import slots_and_tokens_left
from sglang_dflash.host.draft_runner import DraftRunner
from sglang_dflash.host.plan_report import PlanReport
from sglang_dflash.host.protocols import ModelRunner, Req, ScheduleBatch
from sglang_dflash.host.turns import Turn

logger = logging.getLogger(__name__)
CANDIDATES = 8
"""Most candidates of a draft row. More make hardly any tree better: each further one is less likely than all before."""


@dataclass
class TreeVerifyInput(DFlashVerifyInput):
    """With `trees`, `draft_token_num` is the rows of the request with the most; with a mask, those of every tree."""

    trees: ops.PlannedRows | None = None


def why_chains(target_runner: ModelRunner, draft: DraftRunner) -> str | None:
    """Why the rows of a request form no trees; None if they may."""
    if not widths.trees_wanted():
        return f"{widths.TREE}=0"
    if mambaish_config(target_runner.model_config) is not None:
        return "a recurrent state has one successor"
    if get_exec().deterministic.enable_deterministic_inference:
        return "--enable-deterministic-inference keeps the order of keys"
    if draft.most_candidates == 1:
        return "the draft's head gives one candidate for each row"
    return None


def _text_of(req: Req, newest: list[int]) -> Text:
    """newest: tokens of this turn. Each row of a copy needs a slot behind the anchor's, and none goes past the answer's
    last token."""
    room = min(slots_and_tokens_left(req)) - len(newest) - 1
    return Text(req.origin_input_ids, req.output_ids, newest, room)


class PlannedStep:
    """The stages of a step that differ from those of whole blocks: proposal, plan and commit."""

    def __init__(
        self,
        policy: Policy,
        target_runner: ModelRunner,
        draft: DraftRunner,
        lay_out: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Block],
        report: PlanReport | None = None,
    ) -> None:
        """lay_out: bonus ids, prefix lengths, rows of the slot table ([B] each) and block size to a block."""
        self._policy, self._target, self._draft, self._lay_out = policy, target_runner, draft, lay_out
        self._kernels = ops.choose_kernels("cpu").plans
        self.report = report
        self.turn: Turn | None = None
        """The turn that the step belongs to; None: the step is a turn of its own."""
        reason = why_chains(target_runner, draft)
        self._candidates = CANDIDATES if reason is None else 1
        shape = "trees" if reason is None else f"chains ({reason})"
        message = "Steps verify the rows that pay, request by request, in %s; %s=full verifies whole blocks."
        logger.info(message, shape, widths.WIDTH)
        if policy.copying is not None:
            logger.info("Repeated text is copied, not drafted, where that pays (%s=1).", widths.COPY)

    def interrupt(self, rows: int) -> None:
        """See `Policy.interrupt`."""
        self._policy.interrupt(rows)

    def propose(self, batch: ScheduleBatch) -> tuple[VerifyPlan, Any]:
        """Runs the draft where it pays. Returns the rows to verify and the host's KV plan over their slots."""
        if self._policy.copying is not None:
            newest = [[]] * len(batch.reqs) if self.turn is None else self.turn.tokens  # the host gets these later
            texts = zip(batch.reqs, newest, strict=True)
            self._policy.copying.see({req.rid: _text_of(req, new) for req, new in texts})
        turn_s, goes_on = (0.0, False) if self.turn is None else (self.turn.limit_s, self.turn.steps > 0)
        drafting = self._policy.begin([req.rid for req in batch.reqs], turn_s, goes_on)
        requests = (batch.spec_info.bonus_tokens, batch.seq_lens, batch.req_pool_indices)
        proposal: ops.Proposal | None = None
        if drafting.width > 1:
            with spec_stage_span("draft"):
                drafted = requests
                if len(drafting.requests) < len(batch.reqs):
                    some = torch.tensor(drafting.requests)
                    bonus_ids, prefix_lens, rows = requests
                    drafted = bonus_ids[some], prefix_lens[some], rows[some]
                self._draft.write_deferred_context()  # what earlier steps have left
                self._policy.draft_begins()
                block = self._lay_out(*drafted, drafting.width)
                kv_plan = self._plan_kv(block.slots.flatten(), drafted[1], drafted[2], block.drafted_width)
                proposal = self._draft.propose_candidates(block, kv_plan, self._candidates)
        trees = self._policy.choose(None if proposal is None else proposal.log_probs)
        candidates = drafting.candidates(None if proposal is None else proposal.ids)
        table = self._target.req_to_token_pool.req_to_token
        laid = self._kernels.lay_out_trees(trees, *candidates, *requests, table)
        plan = VerifyPlan(*laid, trees.width, trees)
        return plan, self._plan_kv(plan.slots, requests[1], requests[2], plan.verify_width)

    def _plan_kv(self, slots: torch.Tensor, prefix_lens: torch.Tensor, rows: torch.Tensor, extent: int) -> Any:
        return self._target.kv_index_translator.plan(
            req_pool_indices=rows,
            seq_lens=prefix_lens,
            seq_lens_cpu=prefix_lens,
            write_virtual=slots,
            read_extent=extent,
        )

    def commit(
        self, batch: ScheduleBatch, plan: VerifyPlan, accepted: ops.TreeAcceptance, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Makes the accepted paths the sequences: afterwards each committed token's KV is at its position's slot.

        Args:
            hidden: [T or more, taps * H]; the target's tapped layers.

        Returns:
            Of the N committed rows: `hidden`, positions and slots ([N] int64).
        """
        trees = plan.trees
        assert trees is not None
        if plan.verify_width == 1:  # every row is committed
            return hidden, plan.positions, plan.slots
        tables = (self._target.req_to_token_pool.req_to_token, batch.req_pool_indices.long(), batch.seq_lens)
        paged = self._target.token_to_kv_pool_allocator.page_size > 1
        if trees.row_mask is not None and not paged:
            self._kernels.exchange_slots(*tables, accepted.path, accepted.commit_lens, trees.row_starts)
        paths = accepted.path, accepted.commit_lens
        rows, positions, slots, committed = self._kernels.committed_rows(*tables, *paths, hidden)
        if trees.row_mask is not None and paged:
            written = plan.slots[rows]
            moved = slots != written
            if bool(moved.any()):
                self._target.token_to_kv_pool.move_kv_cache(slots[moved], written[moved])
        return committed, positions, slots

    def end(self, accepted: Any) -> None:
        """accepted: `ops.TreeAcceptance`."""
        self._policy.end(accepted.path, accepted.commit_lens)
        if self.report is not None:
            self.report.step()

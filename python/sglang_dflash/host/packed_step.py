"""Chains of different lengths on CUDA (SGLANG_DFLASH_WIDTH=adaptive): each step verifies the likeliest rows of all
blocks, as many as pay, in SGLang's graphs of a fixed number of rows.

The device chooses the rows by the draft's chances; the host chooses how many, by what it has read of earlier steps. So
no step waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_utils import spec_stage_span
from sglang.srt.utils.common import is_sm100_supported

from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyPlan
from sglang_dflash.core.plan_counts import PlanCounts
from sglang_dflash.core.row_budget import Budget, RowBudget
from sglang_dflash.host import simulated, widths
from sglang_dflash.host.device_readings import Readback, StepClock
from sglang_dflash.host.draft_runner import DraftRunner
from sglang_dflash.host.hooking import AROUND, hook
from sglang_dflash.host.plan_report import PlanReport
from sglang_dflash.host.protocols import ModelRunner, ScheduleBatch
from sglang_dflash.host.widths import WIDTH, tree_rows

logger = logging.getLogger(__name__)
BACKENDS = {"fa3"} | ({"trtllm_mha"} if is_sm100_supported() else set())
"""Attention backends whose graphs verify packed rows; the kernels of trtllm_mha do so on SM100 alone."""
KEPT = 0.98
"""Share of what is known of the draft's chances that stays after a step: it forgets within some 50 steps."""
PRIOR_ROWS = 8.0
"""The guess that the draft's own probabilities are right counts as much as so many rows of each depth."""
LOOK_STEPS = 4
"""Steps of whole blocks need no chances. One in so many computes and learns them, and counts for those before it."""


def check(cfg: Any, target: Any) -> None:
    """Refuses, if rows are to be packed, a server that cannot. Arguments and errors: see `fixed_trees.check`."""
    if widths.packs_rows(cfg.device):
        reason = _why_not(cfg, target)
        if reason is not None:
            raise ValueError(f"{WIDTH}=adaptive needs {reason}. Unset it.")


def _why_not(cfg: Any, target: Any) -> str | None:
    if cfg.tp_size > 1:
        return f"--tp-size 1, not {cfg.tp_size}, because ranks could choose different rows"
    if cfg.enable_deterministic_inference:
        return "a server without --enable-deterministic-inference, because the two have never been run together"
    if cfg.enable_lora or cfg.lora_paths:
        return "a server without --enable-lora, because SGLang packs no rows with adapters"
    if cfg.disable_cuda_graph or cfg.disable_decode_cuda_graph or cfg.cuda_graph_backend_decode == "disabled":
        return WITH_GRAPHS
    if cfg.disable_cuda_graph_padding:
        return "a server without --disable-cuda-graph-padding, because graphs have fixed numbers of rows"
    if mambaish_config(target) is not None:
        return "a target without recurrent state, because the two have never been run together"
    if target.is_hybrid_swa:
        return WITHOUT_WINDOWS
    if target.attention_arch == AttentionArch.MLA:
        return "a target without latent attention (MLA), because the two have never been run together"
    if target.is_multimodal:
        return "a target that reads text alone, because positions of images are laid out for whole blocks"
    if tree_rows() is not None:
        return "SGLANG_DFLASH_TREE unset or 0, because trees of a fixed number of rows are verified as a whole"
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0, because the packed rows follow from the drafts"
    return None


WITH_GRAPHS = "CUDA graphs of decode steps, because without them SGLang lays packed rows out on the host"
WITHOUT_WINDOWS = "a target without sliding windows, because the two have never been run together"


def check_backends(cfg: Any) -> None:
    """Refuses attention that takes no packed rows. See `fixed_trees.check_backends`."""
    each = cfg.prefill_attention_backend, cfg.decode_attention_backend  # the first also verifies
    backends = {backend or cfg.attention_backend for backend in each} - {None}
    if widths.packs_rows(cfg.device) and not backends <= BACKENDS:
        raise ValueError(
            f"--attention-backend is {', '.join(sorted(backends))}, and {WIDTH}=adaptive needs one whose graphs verify "
            f"packed rows; allowed: {', '.join(sorted(BACKENDS))}. Choose it, or unset {WIDTH}."
        )


class _Step(NamedTuple):
    batch: int
    budget: Budget


class PackedStep:
    """The proposal of a step: all rows of every block, and which of them the target gets."""

    def __init__(
        self,
        block_size: int,
        target_runner: ModelRunner,
        draft: DraftRunner,
        lay_out: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Block],
        plan_kv: Callable[[Block, ScheduleBatch], Any],
        report: Callable[[PlanCounts], PlanReport] | None = None,
    ) -> None:
        """To be constructed before graphs are captured. lay_out: as of a `PlannedStep`.

        plan_kv: gives the host's KV plan over a block's slots.

        Raises:
            SystemExit: the target has sliding windows, as its class says only when it is loaded.
        """
        if (target_runner.sliding_window_size or 0) > 0:
            raise SystemExit(f"DFLASH cannot start: {WIDTH}=adaptive needs {WITHOUT_WINDOWS}. Unset it.")
        self._block_size, self._target, self._draft = block_size, target_runner, draft
        self._lay_out, self._plan_kv = lay_out, plan_kv
        self._device = torch.device(target_runner.device)
        depths = block_size - 1
        self._totals = ops.ChanceTotals(*torch.zeros(2, depths, device=self._device))
        self._promised_and_accepted = torch.zeros(2, dtype=torch.float64, device=self._device)  # since the start
        self._budget: RowBudget | None = None  # made when the target's graphs are known
        self._readback: Readback[int] = Readback(self._device)
        self._clock: StepClock[_Step] = StepClock(self._device)
        self._log_probs: torch.Tensor | None = None  # of this step's drafts; None: they are not looked at
        self._packed: ops.PackedRows | None = None
        self._due, self._unseen = True, 0  # look at the next chances; steps of whole blocks since the latest look
        self._steps_seen = 1  # steps for which this step's drafts are counted
        self._whole = lru_cache(maxsize=256)(self._pack_whole)
        self._anchors = lru_cache(maxsize=256)(self._pack_anchors)
        self.counts = PlanCounts()
        self.report = None if report is None else report(self.counts)
        draft.weigh_drafts()
        logger.info("Steps verify the likeliest rows of all blocks, as many as pay. %s=full verifies all.", WIDTH)

    def use_graphs(self) -> None:
        """To be called when the target's graphs are captured.

        Raises:
            SystemExit: none are.
        """
        runner = self._target.decode_cuda_graph_runner
        if runner is None:
            raise SystemExit(f"DFLASH cannot start: {WIDTH}=adaptive needs {WITH_GRAPHS}. Unset it.")
        self._budget = RowBudget(self._block_size, runner.capture_num_tokens)

    def warm_up(self) -> None:
        """Compiles the host's kernels that lay packed rows out, for every number of requests."""
        runner, most = self._target.decode_cuda_graph_runner, self._target.max_running_requests
        powers = [1 << place for place in range(most.bit_length() + 1)]
        for count in {one for power in powers for one in (power, max(1, power - 1))}:
            _layout(torch.ones(count, dtype=torch.int32, device=self._device), count)
        for size in runner.capture_num_tokens:
            slots = min(size, runner.max_bs)
            for count in {1, 2, 16, slots}:
                lens = torch.ones(min(count, slots), dtype=torch.int32, device=self._device)
                _layout(lens, size).padded_to_bucket(padded_bs=slots)

    def interrupt(self, rows: int) -> None:
        """Something other than a decode step runs."""
        self._clock.interrupt()

    def propose(self, batch: ScheduleBatch) -> tuple[VerifyPlan, Any]:
        """Lays out a block for every request, and runs the draft if it pays. Returns the rows and the KV plan."""
        budget = self._choose(batch)
        requests = (batch.spec_info.bonus_tokens, batch.seq_lens, batch.req_pool_indices)
        block = self._lay_out(*requests, self._block_size)
        kv_plan = self._plan_kv(block, batch)
        ids = block.ids
        if budget.drafts:
            with spec_stage_span("draft"):
                draft_ids, log_probs = self._draft.propose_weighed(block, batch, kv_plan)
            ids = torch.cat((ids[:, :1], draft_ids), dim=1)
            self._packed = self._pack(len(ids), budget, log_probs)
        else:
            self._log_probs, self._packed = None, self._anchors(len(ids), budget.size)
            self._due = True  # a draft that has not run for a while is looked at
        rows = ids.flatten(), block.positions.flatten(), block.slots.flatten()
        return VerifyPlan(*rows, self._block_size, packed=self._packed), kv_plan

    def _pack(self, count: int, budget: Budget, log_probs: torch.Tensor) -> ops.PackedRows:
        """The rows of a step with a draft. What the host will read is sent: what was promised and accepted before, and
        the gain of rows."""
        whole = budget.rows == count * self._block_size
        self._unseen += whole
        if whole and self._unseen < LOOK_STEPS and not self._due:
            self._log_probs = None
            return self._whole(count, budget.size)
        self._log_probs = log_probs.clone()  # the next draft overwrites them
        self._steps_seen, self._unseen, self._due = max(1, self._unseen), 0, False
        reach = ops.chain_reach(self._log_probs, self._totals, PRIOR_ROWS)
        packed = self._whole(count, budget.size) if whole else ops.likeliest_rows(reach, budget.rows, budget.size)
        self._readback.send(count, torch.cat((self._promised_and_accepted, ops.row_gains(reach))))
        depth = torch.arange(1, self._block_size, device=self._device)
        self._promised_and_accepted[0] += torch.where(depth < packed.lens[:, None], reach, 0.0).sum() * self._steps_seen
        return packed

    def _pack_whole(self, count: int, size: int) -> ops.PackedRows:
        return ops.whole_blocks(count, self._block_size, size, self._device)

    def _pack_anchors(self, count: int, size: int) -> ops.PackedRows:
        ones = torch.ones(count, dtype=torch.int64, device=self._device)
        return ops.pack_rows(ones, self._block_size, count, size)

    def _choose(self, batch: ScheduleBatch) -> Budget:
        assert self._budget is not None
        for (count, budget), seconds in self._clock.readings():
            self._budget.see_time(count, budget, seconds)
            self.counts.seconds += seconds
        for count, values in self._readback.arrived():
            self._budget.see_gains(count, values[2:].numpy())
            promised, accepted = values[:2].tolist()
            self.counts.promised, self.counts.accepted = promised, int(accepted)
        count = len(batch.reqs)
        budget = self._budget.choose(count)
        self._clock.mark(_Step(count, budget))
        self.counts.steps += 1
        if budget.drafts:
            self.counts.blocks += count
            self.counts.rows += budget.rows - count
            self.counts.depth += budget.rows - count  # of chains
        return budget

    def end(self, accepted: Any) -> None:
        """Learns how right the draft's chances were. accepted: `ops.GreedyAcceptance`."""
        if self._log_probs is not None:
            assert self._packed is not None
            lens, commit_lens = self._packed.lens, accepted.commit_lens
            ops.learn_chances(self._totals, self._log_probs, lens, commit_lens, KEPT)
            self._promised_and_accepted[1] += (commit_lens - 1).sum() * self._steps_seen
        if self.report is not None:
            self.report.step()


def verified_rows(plan: VerifyPlan) -> dict[str, Any]:
    """The fields of the host's verify input that say which rows of the blocks are verified; none if all are."""
    packed = plan.packed
    if packed is None:
        return {}
    return {"kv_loc_cols": packed.padded(), "ragged_verify_layout": _layout(packed.lens, packed.size)}


def _layout(lens: torch.Tensor, size: int) -> RaggedVerifyLayout:
    return RaggedVerifyLayout.from_verify_lens_device(verify_lens=lens, graph_num_tokens=size)


@hook(
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.ragged_verify_compact_graphs_enabled",
    AROUND,
    why="SGLang captures graphs of packed rows for DSPARK alone",
    until="SGLang captures them for DFLASH",
)
def captures_packed_rows(original: Any, algorithm: Any) -> bool:
    """Whether the target's graphs are captured by their number of rows, which may be of requests of any lengths."""
    return bool(original(algorithm)) or (algorithm.is_dflash() and widths.packs_rows(get_device().device))

"""Trees of N rows for every request (SGLANG_DFLASH_TREE=N), so that graphs of one shape can verify them.

The draft fills whole blocks, and its likeliest rows form the trees. No step waits for the device, so nothing is learned
from what is accepted. Accepted rows keep their places in the slot table, which the scheduler may be reading: their KV
moves instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_utils import spec_stage_span

from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyPlan
from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.host import simulated
from sglang_dflash.host.draft_input import known_kv_lens
from sglang_dflash.host.draft_runner import DraftRunner
from sglang_dflash.host.hooking import AROUND, hook
from sglang_dflash.host.planned_step import CANDIDATES
from sglang_dflash.host.protocols import ModelRunner, ScheduleBatch
from sglang_dflash.host.widths import TREE, tree_rows

logger = logging.getLogger(__name__)
MOST_ROWS = 64
"""The host's mask for graphs has a byte for each row and key of the largest batch."""
BACKENDS = {"triton"}
"""Attention backends that take a mask of ancestors, at fixed places and without a look at its values."""
MOVED_AT_ONCE = 256  # slots in one launch of the host's move of KV, at most


def check(cfg: Any, target: Any, draft: DraftConfig, block_size: int) -> None:
    """Refuses, if the variable asks for N rows, a number that trees cannot have and a server that cannot verify them.

    Args:
        cfg: the host's view of the server arguments.
        target: the host's `ModelConfig`.

    Raises:
        ValueError: one sentence that names the value, the variable and what is needed.
    """
    rows = tree_rows()
    if rows is None:
        return
    most = ops.most_rows(block_size - 1, CANDIDATES, MOST_ROWS)
    if rows > most:
        raise ValueError(
            f"{TREE} is {rows}; allowed: 0 (chains), 1 (trees where rows are planned), or 2 to {most}, the rows of "
            f"every tree over blocks of {block_size}."
        )
    reason = _why_not(cfg, target, draft)
    if reason is not None:
        raise ValueError(f"{TREE}={rows} needs {reason}. Unset it.")


def _why_not(cfg: Any, target: Any, draft: DraftConfig) -> str | None:
    if cfg.tp_size > 1:
        return f"--tp-size 1, not {cfg.tp_size}, because ranks could choose different trees"
    if cfg.enable_deterministic_inference:
        return "a server without --enable-deterministic-inference, because a tree's keys stand in another order"
    if cfg.enable_lora or cfg.lora_paths:
        return "a server without --enable-lora, because the two have never been run together"
    if mambaish_config(target) is not None:
        return "a target without recurrent state, because a state has one successor"
    if target.is_hybrid_swa:
        return WITHOUT_WINDOWS
    if target.attention_arch == AttentionArch.MLA:
        return "a target without latent attention (MLA), because the two have never been run together"
    if draft.selector is not None or draft.domino is not None:
        return "a draft whose head gives several candidates for a row; DFlash2's and Domino's give one"
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0, because the mask follows from the drafts"
    return None


WITHOUT_WINDOWS = "a target without sliding windows, because the kernel counts a window's keys by slot, not by depth"


def check_backends(cfg: Any) -> None:
    """Refuses attention that takes no mask. cfg: with the backends that the host has chosen.

    Raises:
        ValueError: one sentence that names the backend, what is allowed, and the variable.
    """
    backends = {cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend} - {None}
    if tree_rows() is not None and not backends <= BACKENDS:
        raise ValueError(
            f"--attention-backend is {', '.join(sorted(backends))}, and {TREE}={tree_rows()} needs one that verifies "
            f"trees at fixed places; allowed: {', '.join(sorted(BACKENDS))}. Choose it, or unset {TREE}."
        )


def resolved(block_size: int) -> dict[str, int]:
    """The host's settings from which it sizes slots, buffers and results: they must do for block and tree."""
    rows = tree_rows()
    if rows is None:
        return {}
    return {"speculative_num_draft_tokens": max(rows, block_size), "speculative_dflash_block_size": block_size}


def block_size() -> int:
    """K, the rows that the draft fills."""
    spec = get_spec()
    return int(spec.speculative_num_draft_tokens if tree_rows() is None else spec.speculative_dflash_block_size)


class FixedTreeStep:
    """The stages of a step that differ from those of whole blocks: proposal and commit. Like a `PlannedStep`."""

    report = None  # rows are as many in every step

    def __init__(
        self,
        rows: int,
        target_runner: ModelRunner,
        draft: DraftRunner,
        lay_out: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Block],
    ) -> None:
        """To be constructed before graphs are captured. lay_out: as of a `PlannedStep`.

        Raises:
            SystemExit: the target has sliding windows, as its class says only when it is loaded.
        """
        if (target_runner.sliding_window_size or 0) > 0:
            raise SystemExit(f"DFLASH cannot start: {TREE}={rows} needs {WITHOUT_WINDOWS}. Unset it.")
        self._rows, self._target, self._draft, self._lay_out = rows, target_runner, draft, lay_out
        self._block_size = block_size()
        self._context_len = target_runner.model_config.context_len
        self._length = min(rows, self._block_size)  # of the longest path
        draft.draft_trees(rows, min(CANDIDATES, rows - 1))
        logger.info(
            "Steps verify trees of %d rows, the likeliest of blocks of %d; no GPU has run this. %s=0 verifies blocks.",
            *(rows, self._block_size, TREE),
        )

    def warm_up(self) -> None:
        """Compiles the move of KV for every number of rows, with slot 0, which no request owns."""
        most = min(MOVED_AT_ONCE, self._target.max_running_requests * self._length)
        slots = torch.zeros(most, dtype=torch.int64, device=self._target.device)
        for count in range(1, most + 1):
            self._target.token_to_kv_pool.move_kv_cache(slots[:count], slots[:count])

    def interrupt(self, rows: int) -> None:
        """No time is measured."""

    def propose(self, batch: ScheduleBatch) -> tuple[VerifyPlan, Any]:
        """Runs the draft over whole blocks. Returns the rows to verify and the host's KV plan over their slots."""
        requests = (batch.spec_info.bonus_tokens, batch.seq_lens, batch.req_pool_indices)
        block = self._lay_out(*requests, self._block_size)
        kv_plan = self._plan_kv(block.slots.flatten(), batch, self._block_size)
        with spec_stage_span("draft"):
            drafted = self._draft.propose_trees(block, batch, kv_plan)
        table = self._target.req_to_token_pool.req_to_token
        positions, slots = ops.lay_out_fixed_trees(drafted.depths, *requests[1:], table)
        count, rows = len(block.ids), self._rows
        cells = rows * (min(known_kv_lens(batch, 0)[1], count * self._context_len) + count * rows)
        mask = ops.attention_mask(drafted.seen, batch.seq_lens, cells)
        plan = VerifyPlan(drafted.ids.flatten(), positions, slots, rows, self._planned_rows(drafted), mask)
        return plan, self._plan_kv(slots, batch, rows)

    def _planned_rows(self, drafted: ops.DraftedTrees) -> ops.PlannedRows:
        count, device = len(drafted.ids), drafted.ids.device
        parents, depths, ranks = (rows.flatten() for rows in (drafted.parents, drafted.depths, drafted.ranks))
        requests = torch.arange(count, device=device).repeat_interleave(self._rows)
        row_starts = torch.arange(count + 1, device=device) * self._rows
        return ops.PlannedRows(
            parents,
            depths,
            ranks,
            requests,
            row_starts,
            counts=torch.full((count,), self._rows, dtype=torch.int32, device=device),
            lens=[self._rows] * count,
            row_mask=drafted.seen,
            length=self._length,
            width=self._rows,
        )

    def _plan_kv(self, slots: torch.Tensor, batch: ScheduleBatch, extent: int) -> Any:
        return self._target.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=known_kv_lens(batch, 0)[0],
            write_virtual=slots,
            read_extent=extent,
        )

    def commit(
        self, batch: ScheduleBatch, plan: VerifyPlan, accepted: ops.TreeAcceptance, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Moves the accepted rows' KV to the slots of their positions.

        hidden: [T or more, taps * H]; the target's tapped layers.

        Returns:
            `hidden`, positions and slots ([B * L] int64) of as many rows for each request: the committed ones, then
            places behind them, to which the next step writes again.
        """
        final = ops.final_slots(plan.slots, accepted.path, accepted.commit_lens, batch.seq_lens)
        self._target.token_to_kv_pool.move_kv_cache(final.slots, final.sources)
        return hidden[accepted.path.flatten()], final.positions, final.slots

    def end(self, accepted: Any) -> None:
        """Nothing is learned."""


@hook(
    "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.get_num_tokens_per_req_for_target_verify",
    AROUND,
    why="draft and target are captured and sized for equally many rows; with `SGLANG_DFLASH_TREE=N` they have K and N",
    until="SGLang takes the rows of each runner",
)
def rows_of_runner(original: Any, algorithm: Any, num_draft_tokens: int, is_draft_worker: bool) -> int:
    """The host captures and sizes draft and target for equally many rows. Here the draft has K, the target N."""
    rows = tree_rows()
    if rows is None or not algorithm.is_dflash():
        return original(algorithm, num_draft_tokens, is_draft_worker)
    return block_size() if is_draft_worker else rows


@hook(
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
    AROUND,
    why="with `SGLANG_DFLASH_TREE=N`: DFLASH's verify is captured without a mask on triton",
    until="SGLang captures one if asked",
)
def captured_input(original: Any, runner: Any, num_tokens: int) -> Any:
    """The host captures DFLASH's verification without a mask on backends that need none for a chain."""
    verify_input = original(runner, num_tokens)
    model_runner = runner.model_runner
    if tree_rows() is not None and model_runner.spec_algorithm.is_dflash() and not model_runner.is_draft_worker:
        verify_input.custom_mask = runner.buffers.custom_mask
    return verify_input

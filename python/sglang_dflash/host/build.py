"""Builds the worker for a target: loads the draft, makes the parts of a step, and chooses who plans its rows."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

from sglang_dflash import ops
from sglang_dflash.host import fixed_trees, widths
from sglang_dflash.host.acceptance import Acceptor
from sglang_dflash.host.arguments import read_draft_config, trained_mask_embedding
from sglang_dflash.host.capture import lm_head_of
from sglang_dflash.host.draft_runner import DraftRunner
from sglang_dflash.host.fixed_trees import FixedTreeStep
from sglang_dflash.host.hidden_states import ReturnedHiddenStates
from sglang_dflash.host.packed_step import PackedStep
from sglang_dflash.host.plan_report import PlanReport
from sglang_dflash.host.planned_step import PlannedStep
from sglang_dflash.host.protocols import ModelRunner
from sglang_dflash.host.recurrent_state import RecurrentState
from sglang_dflash.host.sampling import RowSampler
from sglang_dflash.host.sharded_logits import ShardedLogits
from sglang_dflash.host.short_head import special_ids
from sglang_dflash.host.worker import DFlashWorker, WorkerParts


def build_worker(server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> DFlashWorker:
    """What SGLang's scheduler calls in the place of a worker's class."""
    target: ModelRunner = target_worker.model_runner
    block_size, tree_rows = fixed_trees.block_size(), widths.tree_rows()
    cfg = resolving_view(server_args)
    draft_config = read_draft_config(cfg)
    assert draft_config.mask_token_id is not None  # resolved by `read_draft_config`
    tp_sync = SpecTpSync(get_parallel().tp_group)
    kernels = ops.choose_kernels(target_worker.device, target.dtype)
    draft = DraftRunner.build(server_args, gpu_id, nccl_port, target, block_size, tp_sync)
    draft.use_mask_embedding(trained_mask_embedding(cfg, draft_config))
    lm_head = lm_head_of(target.model)
    draft.shorten_head(lm_head, target.model_config.vocab_size, special_ids(target_worker))
    verified_rows = tree_rows or block_size
    sampler = RowSampler(target, verified_rows, kernels)
    sharded_logits = ShardedLogits.of(target.model, unwrap_lora_layer(lm_head), kernels)
    one_rank = get_parallel().tp_size == 1
    parts = WorkerParts(
        target_worker=target_worker,
        block_size=block_size,
        verified_rows=verified_rows,
        mask_token_id=draft_config.mask_token_id,
        kernels=kernels,
        tp_sync=tp_sync,
        draft=draft,
        sampler=sampler,
        acceptor=Acceptor(sampler, kernels, tp_sync, sharded_logits, one_rank),
        hidden_states=ReturnedHiddenStates(target.model),
        recurrent_state=RecurrentState.of(target_worker),
        sharded_logits=sharded_logits,
    )
    worker = DFlashWorker(parts)
    worker.planned = _planned_step(worker, parts, tree_rows)
    return worker


def _planned_step(
    worker: DFlashWorker, parts: WorkerParts, tree_rows: int | None
) -> PlannedStep | FixedTreeStep | PackedStep | None:
    """Who plans the rows of a step, as the variables and the device ask; None: blocks are whole."""
    target: ModelRunner = parts.target_worker.model_runner
    copying = widths.choose_copying(parts.block_size, target.model_config.vocab_size, parts.recurrent_state is not None)
    planner = widths.choose_planner(parts.block_size, target.device, get_parallel().tp_group, copying)
    if tree_rows is not None:
        return FixedTreeStep(tree_rows, target, parts.draft, worker.lay_out)
    if widths.packs_rows(target.device):
        return PackedStep(parts.block_size, target, parts.draft, worker.lay_out, worker.plan_kv, report=PlanReport)
    if planner is None:
        return None
    report = PlanReport(planner.counts, planner.settle, planner.request_ends)
    return PlannedStep(planner, target, parts.draft, worker.lay_out, report)

"""Builds the worker for a target: loads the draft, makes the parts of a step, and picks the policy of its rows."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

from sglang_dflash import ops
from sglang_dflash.core.draft_folder import read_own_head
from sglang_dflash.core.policy import Policy, SameRows
from sglang_dflash.core.rows import RowPolicy
from sglang_dflash.host.patches.capture import lm_head_of
from sglang_dflash.host.start import widths
from sglang_dflash.host.start.draft_files import read_draft_config, trained_mask_embedding, weights_folder
from sglang_dflash.host.worker import equal_ranks
from sglang_dflash.host.worker.acceptance import Acceptor
from sglang_dflash.host.worker.beside_rows import BesideRows
from sglang_dflash.host.worker.copied_rows import CopiedRows
from sglang_dflash.host.worker.device_rows import DeviceRows
from sglang_dflash.host.worker.draft_runner import DraftRunner
from sglang_dflash.host.worker.hidden_states import ReturnedHiddenStates
from sglang_dflash.host.worker.plan_stream import PlanStream
from sglang_dflash.host.worker.protocols import ModelRunner
from sglang_dflash.host.worker.recurrent_state import RecurrentState
from sglang_dflash.host.worker.row_report import RowReport
from sglang_dflash.host.worker.rows import StepRows
from sglang_dflash.host.worker.sampling import RowSampler, draws_asked
from sglang_dflash.host.worker.sharded_logits import ShardedLogits
from sglang_dflash.host.worker.shared_policy import SharedPolicy
from sglang_dflash.host.worker.short_head import special_ids
from sglang_dflash.host.worker.trees import TreeRows
from sglang_dflash.host.worker.trimmed_rows import TrimmedRows, can_trim
from sglang_dflash.host.worker.width_graphs import WidthGraphs
from sglang_dflash.host.worker.worker import DFlashWorker, WorkerParts

logger = logging.getLogger(__name__)


def build_worker(server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> DFlashWorker:
    """What SGLang's scheduler calls in the place of a worker's class."""
    target: ModelRunner = target_worker.model_runner
    block_size = get_spec().speculative_num_draft_tokens
    cfg = resolving_view(server_args)
    draft_config = read_draft_config(cfg)
    assert draft_config.mask_token_id is not None  # resolved by `read_draft_config`
    kernels = ops.choose_kernels(target_worker.device, target.dtype)
    equal_ranks.require_equal(get_parallel().tp_group, draft_config, kernels)
    tp_sync = SpecTpSync(get_parallel().tp_group)
    draft = DraftRunner.build(server_args, gpu_id, nccl_port, target, block_size, draft_config.anchor_first, tp_sync)
    draft.use_mask_embedding(trained_mask_embedding(cfg, draft_config))
    lm_head = lm_head_of(target.model)
    if draft_config.head_vocab_size is not None:
        folder = weights_folder(cfg.speculative_draft_model_path, cfg.speculative_draft_model_revision)
        assert folder is not None, cfg.speculative_draft_model_path
        draft.use_own_head(read_own_head(folder, draft_config.head_vocab_size))
    else:
        draft.shorten_head(lm_head, target.model_config.vocab_size, special_ids(target_worker))
    sampler = RowSampler(target, block_size, kernels, draws_asked())
    sharded_logits = ShardedLogits.of(target.model, unwrap_lora_layer(lm_head), kernels)
    one_rank = get_parallel().tp_size == 1
    parts = WorkerParts(
        target_worker=target_worker,
        block_size=block_size,
        mask_token_id=draft_config.mask_token_id,
        kernels=kernels,
        tp_sync=tp_sync,
        draft=draft,
        sampler=sampler,
        acceptor=Acceptor(sampler, kernels, tp_sync, sharded_logits, one_rank),
        hidden_states=ReturnedHiddenStates(target.model),
        step_rows=_step_rows(target, cfg, block_size, draft, draft_config.mask_token_id, kernels),
        recurrent_state=RecurrentState.of(target_worker, block_size),
        sharded_logits=sharded_logits,
    )
    return DFlashWorker(parts)


def _step_rows(
    target: ModelRunner, cfg: Any, block_size: int, draft: DraftRunner, mask_token_id: int, kernels: ops.Kernels
) -> StepRows:
    """Who chooses the rows of a step, as the variable and the device ask. cfg: see `can_trim`."""
    asked, parts = widths.asked(target.device), (target, draft, mask_token_id, kernels)
    on_graphs = widths.on_graphs(target.device)
    if of_tree := widths.tree_rows():
        return TreeRows(of_tree, block_size, *parts)
    if asked in (widths.FULL, block_size):
        kind = BesideRows if PlanStream.wanted(target.device) else StepRows
        return kind(block_size, SameRows(block_size), *parts)
    if asked != widths.AUTO:
        rows = StepRows(block_size, SameRows(int(asked)), *parts)
        rows.graphs = WidthGraphs(target, draft, [int(asked)]) if on_graphs else None
        return rows
    if on_graphs and can_trim(cfg, target):
        policy = RowPolicy(block_size, [block_size], together=True, size_of=lambda rows: trimmed.size_for(rows))
        trimmed = TrimmedRows(block_size, _shared(policy), *parts, RowReport)
        logger.info("Steps verify the likeliest rows, as many as pay; %s=full verifies whole blocks.", widths.WIDTH)
        return trimmed
    own = RowPolicy(block_size, together=on_graphs, trims=not on_graphs)
    shared = _shared(own)
    if on_graphs:
        logger.info("Steps have the width that pays; %s=full verifies whole blocks.", widths.WIDTH)
        rows = DeviceRows(block_size, shared, *parts, RowReport)
        rows.graphs = WidthGraphs(target, draft, [*own.widths, 1])
        return rows
    logger.info("Steps verify the rows that pay, request by request; %s=full verifies whole blocks.", widths.WIDTH)
    if widths.copies():
        logger.info("Text that repeats itself is copied, not drafted, where that promises more (%s=1).", widths.COPIES)
        return CopiedRows(block_size, own, *parts, RowReport)
    return StepRows(block_size, shared, *parts, RowReport)


def _shared(policy: RowPolicy) -> Policy:
    """What all ranks ask."""
    group = get_parallel().tp_group
    return policy if group.world_size == 1 else SharedPolicy(policy, group)

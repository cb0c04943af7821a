"""The DFLASH worker: runs SGLang's prefill and decode steps with DFlash drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import SamplingPrewarmResult
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import spec_stage_span

from sglang_dflash import ops
from sglang_dflash.core.block import VerifyRows
from sglang_dflash.core.policy import StepSeconds
from sglang_dflash.host.patches import page_tables
from sglang_dflash.host.patches.ragged import RaggedVerifyInput
from sglang_dflash.host.start import waiting
from sglang_dflash.host.worker.acceptance import Acceptor
from sglang_dflash.host.worker.draft_input import DraftInput, bounded_kv_lens, upload
from sglang_dflash.host.worker.draft_runner import DraftRunner
from sglang_dflash.host.worker.hidden_states import ReturnedHiddenStates
from sglang_dflash.host.worker.protocols import ForwardBatch, ModelRunner, ScheduleBatch
from sglang_dflash.host.worker.recurrent_state import RecurrentState
from sglang_dflash.host.worker.row_report import RowReport
from sglang_dflash.host.worker.rows import StepRows
from sglang_dflash.host.worker.sampling import RowSampler
from sglang_dflash.host.worker.sampling_memory import measure_sampling
from sglang_dflash.host.worker.sharded_logits import ShardedLogits

logger = logging.getLogger(__name__)
Publish = Callable[[torch.Tensor], None] | None


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What the worker's steps are made of.

    Fields:
        target_worker: SGLang's worker of the target, with its `model_runner`.
        tp_sync: gives all ranks the same tokens.
        recurrent_state: None: the target has none.
        sharded_logits: None: verify forwards gather their logits.
    """

    target_worker: Any
    block_size: int
    mask_token_id: int
    kernels: ops.Kernels
    tp_sync: SpecTpSync
    draft: DraftRunner
    sampler: RowSampler
    acceptor: Acceptor
    hidden_states: ReturnedHiddenStates
    step_rows: StepRows
    recurrent_state: RecurrentState | None = None
    sharded_logits: ShardedLogits | None = None


class DFlashWorker(BaseSpecWorker):
    """Runs SGLang's prefill and decode steps with DFlash drafts, with overlap scheduling on or off.

    SGLang's scheduler has it built, hands it the target's pools, and calls `forward_batch_generation` once per
    step; under overlap it restores the batch afterwards, so a step may change the batch freely.
    """

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__()
        self._target_worker = parts.target_worker
        self._target: ModelRunner = parts.target_worker.model_runner
        self.device = parts.target_worker.device
        self.block_size = parts.block_size
        self.speculative_num_draft_tokens = parts.block_size  # the scheduler reads it
        self._mask_token_id, self._kernels, self._tp_sync = parts.mask_token_id, parts.kernels, parts.tp_sync
        self._draft, self._sampler, self._acceptor = parts.draft, parts.sampler, parts.acceptor
        self._hidden_states, self._recurrent_state = parts.hidden_states, parts.recurrent_state
        self._sharded_logits = parts.sharded_logits
        self.step_rows = parts.step_rows
        self.prefilled = 0  # prompt tokens whose draft KV was computed; `/server_info` reports it

    # What the scheduler needs from a worker besides steps.

    @property
    def draft_worker(self) -> Any:
        return self._draft.worker

    @property
    def model_runner(self) -> Any:
        """The draft's: what `save_remote_model` exports beside the target."""
        return self._draft.runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return self._target.attn_backend, self._draft.runner.attn_backend

    @property
    def row_report(self) -> RowReport | None:
        """None: all steps verify the same rows."""
        return self.step_rows.report

    @property
    def step_seconds(self) -> StepSeconds | None:
        """For `/server_info`."""
        return self.step_rows.policy.step_seconds()

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("draft", self._draft.weights())]

    def follow_target(self) -> None:
        """Called after each update of the target's weights."""
        if self._draft.short_head is not None:
            self._draft.short_head.mark_stale()

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        self._draft.alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        token_to_kv_pool_allocator.dflash_draft_kv = self._draft.runner.token_to_kv_pool  # for backups
        if self._recurrent_state is not None:
            self._recurrent_state.announce(memory_pool_config)

    def init_attention_backends(self) -> None:
        self._draft.init_attention_backends()
        page_tables.widen(self.spec_v2_attn_backends)  # SGLang has made the target's before
        waiting.announce(self.spec_v2_attn_backends, self.device)

    def init_cuda_graphs(self) -> None:
        self._draft.init_graphs()
        self.step_rows.use_graphs(self._prepare_verify)

    def prewarm_sampling(self) -> SamplingPrewarmResult:
        """Compiles the step's kernels and measures sampling, while no request waits for it or can run out of memory."""
        table, vocab_size = self._target.req_to_token_pool.req_to_token, self._target.model_config.vocab_size
        if not table.is_cuda:
            return super().prewarm_sampling()
        verified = vocab_size if self._sharded_logits is None else self._sharded_logits.span
        compared = {(verified, torch.float32), self._draft.compared_logits}
        for width in self.step_rows.widths:
            ops.warm_up(width, compared, vocab_size, table, self._mask_token_id, self._sampler.draws)
        self._draft.warm_up()
        self.step_rows.warm_up()
        most = self._target.max_running_requests
        seeded = get_exec().deterministic.enable_deterministic_inference
        result = measure_sampling(
            self._sampler, max(self.step_rows.widths), most, vocab_size, seeded, self.device, self._true_on_all_ranks
        )
        if self._sharded_logits is not None:  # gathered, the logits take memory of their own
            gathered = most * self.block_size * vocab_size * torch.float32.itemsize
            result = replace(result, sampling_headroom_bytes=result.sampling_headroom_bytes + gathered)
        self._target.sampling_prewarm_result = result
        return result

    def _true_on_all_ranks(self, flag: bool) -> bool:
        group = get_parallel().tp_group
        if group.world_size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return bool(flags.item())

    # A step.

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """One prefill or decode step of a `ScheduleBatch`.

        Args:
            on_publish: called with the new prefix lengths ([B] int64) as soon as they exist; the next step's
                preparation waits for nothing else.
            grammar_barrier: advances the grammars over the previous step's tokens; given under overlap.
        """
        if batch.forward_mode.is_decode():
            return self._decode(batch, on_publish, grammar_barrier)
        self.step_rows.interrupt()
        return self._idle(on_publish) if batch.forward_mode.is_idle() else self._prefill(batch, on_publish)

    def _prefill(self, batch: ScheduleBatch, on_publish: Publish) -> GenerationBatchResult:
        group = self._sampler.prefill(batch)
        self._begin_states(batch)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        if self._draft.short_head is not None:  # on the CPU, while an accelerator runs the forward
            self._draft.short_head.see_prompts(batch.reqs)
        kv_plan, result.kv_loc_plan = result.kv_loc_plan, None
        self._tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._sampler.commit_first(batch, group, result.next_token_ids)
        # Within this call: once prefill returns, another request may hit these tokens in the radix tree.
        positions = upload(ops.extend_positions(batch.prefix_lens, batch.extend_lens), self.device)
        self._draft.write_context(result.logits_output.hidden_states, positions, self._draft.slots_of(kv_plan))
        self.prefilled += len(positions)
        logger.debug("draft KV of %d prompt tokens written", len(positions))
        self._hidden_states.put(batch, result.logits_output, [n - 1 for n in accumulate(batch.extend_lens)])
        result.next_draft_input = DraftInput.create(result.next_token_ids, batch.seq_lens)
        return result

    def receive(self, batch: ScheduleBatch) -> None:
        """Starts requests whose KV, of both models, another server has computed, or a backup of retracted requests has
        kept: no prefill of ours has seen them."""
        self._sampler.receive(batch)
        self._begin_states(batch)
        if self._draft.short_head is not None:
            self._draft.short_head.see_prompts(batch.reqs)
        given = batch.spec_info
        batch.spec_info = DraftInput.create(given.bonus_tokens, given.new_seq_lens)
        batch.spec_info.future_indices = given.future_indices

    def _begin_states(self, batch: ScheduleBatch) -> None:
        if self._recurrent_state is not None:
            self._recurrent_state.begin(batch)

    def _decode(self, batch: ScheduleBatch, on_publish: Publish, grammar_barrier: Any) -> GenerationBatchResult:
        if batch.seq_lens.is_cuda:
            batch.seq_lens.record_stream(torch.cuda.current_stream())  # allocated on the schedule stream
        rows, kv_plan, prepared = self.step_rows.propose(batch)  # block, draft, rows
        grammar_tree = self._sampler.grammar_tree(batch, rows)
        with spec_stage_span("verify"):
            target = self._verify(rows, prepared, batch, kv_plan)
        if self._draft.short_head is not None:
            self._draft.short_head.see_answers(batch.reqs)
        out = target.logits_output
        accepted, group = self._acceptor.accept(rows, batch, out, grammar_tree, grammar_barrier)
        self._sampler.commit(batch, group, accepted.out_ids, accepted.commit_lens)
        if self._recurrent_state is not None:
            self._recurrent_state.commit(batch, accepted.commit_lens)
        prefix_lens = batch.seq_lens + accepted.commit_lens
        if on_publish is not None:
            on_publish(prefix_lens)
        self._draft.write_context(
            *self.step_rows.committed(rows, accepted, out.hidden_states, self._slots(rows, kv_plan))
        )
        self._hidden_states.put(batch, out, row_of=None if rows.chosen is None else rows.chosen.row_of)
        self.step_rows.learn(rows, accepted.commit_lens)
        return self._result(rows, target, accepted, prefix_lens)

    def _result(
        self,
        rows: VerifyRows,
        target: GenerationBatchResult,
        accepted: ops.TreeAcceptance | ops.GreedyAcceptance,
        prefix_lens: torch.Tensor,
    ) -> GenerationBatchResult:
        """What the scheduler reads of a step, the next step's draft input among it."""
        return GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=accepted.out_ids.flatten(),
            accept_lens=accepted.commit_lens,
            speculative_num_draft_tokens=rows.width,
            cap_lens=self.step_rows.cap_lens(rows),
            next_draft_input=DraftInput.create(accepted.bonus_ids, prefix_lens),
            new_seq_lens=prefix_lens,
            can_run_cuda_graph=target.can_run_cuda_graph,
            routed_experts_output=target.routed_experts_output,
            indexer_topk_output=target.indexer_topk_output,
        )

    def _slots(self, rows: VerifyRows, kv_plan: Any) -> torch.Tensor:
        """[T] int64: slots of the draft's pool, one for each verified row."""
        slots = self._draft.slots_of(kv_plan)
        return slots if rows.chosen is None else slots[rows.chosen.kept]

    def _prepare_verify(self, rows: VerifyRows, batch: ScheduleBatch, kv_plan: Any) -> ForwardBatch:
        """The target's `ForwardBatch` over the rows, and its attention metadata."""
        ids, positions, slots = rows.forward_rows()
        verify_input = RaggedVerifyInput(
            draft_token=ids,
            positions=positions,
            draft_token_num=rows.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=kv_plan,
            **self.step_rows.verify_fields(rows),
        )
        batch.out_cache_loc = slots
        # Without graphs, the forward prepares the attention metadata itself.
        eager = self.device == "cpu" and self._target.decode_cuda_graph_runner is None
        with bounded_kv_lens(batch, rows.width):
            forward_batch, _ = verify_input.prepare_for_verify(batch, self._target_worker, defer_metadata_init=eager)
        return forward_batch

    def _verify(
        self, rows: VerifyRows, forward_batch: ForwardBatch | None, batch: ScheduleBatch, kv_plan: Any
    ) -> GenerationBatchResult:
        """The target's forward over the rows; its result includes the tapped layers' hidden states."""
        if forward_batch is None:
            forward_batch = self._prepare_verify(rows, batch, kv_plan)
        return self._run_target(forward_batch)

    def _run_target(self, forward_batch: ForwardBatch) -> GenerationBatchResult:
        return self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )

    def _idle(self, on_publish: Publish) -> GenerationBatchResult:
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        if on_publish is not None:
            on_publish(nothing)
        return GenerationBatchResult(
            logits_output=None,
            next_token_ids=nothing,
            accept_lens=nothing.int(),
            speculative_num_draft_tokens=self.block_size,
            next_draft_input=DraftInput.create(nothing, nothing),
            new_seq_lens=nothing,
            can_run_cuda_graph=False,
        )

"""Runs the draft model: one forward over the block, then its head."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_context, get_exec, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.draft_worker_common import (
    DraftWorkerBundle,
    build_draft_tp_worker,
    make_draft_block_spec_info,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import draft_pp_context

from sglang_dflash import ops
from sglang_dflash.core.block import Block
from sglang_dflash.core.draft_folder import OwnHead
from sglang_dflash.host.patches.capture import embedding_of, lm_head_of
from sglang_dflash.host.patches.weights import WatchedRunner
from sglang_dflash.host.worker.context_kv import ContextKVWriter
from sglang_dflash.host.worker.draft_heads import DraftHead, head_of
from sglang_dflash.host.worker.draft_window import DraftWindow
from sglang_dflash.host.worker.plan_stream import PlanStream, own_input_buffers
from sglang_dflash.host.worker.protocols import ModelRunner
from sglang_dflash.host.worker.short_head import VARIABLE, ShortHead, asked

logger = logging.getLogger(__name__)
MIN_GRAPH_MEMORY_GB = 1.0


def _lookup(embedding: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Reads a plain table without its layer: for a small batch, the layer's Python costs more than the lookup."""
    plain = type(embedding) is VocabParallelEmbedding and type(embedding.quant_method) is UnquantizedEmbeddingMethod
    if not plain or embedding.tp_size > 1 or embedding.output_dtype is not None:
        return embedding
    return lambda ids: F.embedding(ids, embedding.weight)


@contextmanager
def rows_a_request(rows: int) -> Iterator[None]:
    """What SGLang makes within this block, backends and graphs, is for so many rows a request."""
    context, served = get_context(), get_spec().speculative_num_draft_tokens
    context.override("sglang_dflash.rows_a_request", speculative_num_draft_tokens=rows)
    try:
        yield
    finally:
        context.override("sglang_dflash.rows_a_request", speculative_num_draft_tokens=served)


class DraftRunner:
    """The draft model inside SGLang: its worker, its KV pool over the target's slots, its graphs."""

    def __init__(
        self,
        bundle: DraftWorkerBundle,
        head: DraftHead,
        context_kv: ContextKVWriter,
        embed: Callable[[torch.Tensor], torch.Tensor],
        embed_scale: float,
        tp_sync: SpecTpSync,
    ) -> None:
        """
        Args:
            bundle: SGLang's worker, runner and model of the draft.
            embed: the target's embedding: ids to rows; `embed_scale` is their factor.
        """
        self.worker = bundle.draft_worker
        self.runner = bundle.draft_model_runner
        self.model = bundle.draft_model
        self.short_head: ShortHead | None = None  # None: the draft chooses among all ids
        self._head, self._context_kv = head, context_kv
        self._embed, self._embed_scale, self._tp_sync = embed, embed_scale, tp_sync
        self._mask_rows: torch.Tensor | None = None
        self._captures_head = True
        self._window: DraftWindow | None = None
        self._spec_infos = {
            rows: make_draft_block_spec_info(draft_token_num=rows, device=self.runner.device)
            for rows in range(1, self.model.block_size + 1)
        }

    @classmethod
    def build(
        cls,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_runner: ModelRunner,
        block_size: int,
        anchor_first: bool,
        tp_sync: SpecTpSync,
    ) -> DraftRunner:
        """Loads the draft beside its target."""
        with draft_pp_context():
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=target_runner.model_config,
                algo_label="DFLASH",
            )
        model = bundle.draft_model
        model.set_block_size(block_size - anchor_first)
        if bundle.draft_model_runner.device == "cpu":
            for layer in model.layers:
                layer.self_attn.use_table_qk_norm_rope = False  # Triton, also without CUDA (models/dflash.py:383)
        target_model = target_runner.model
        embed = _lookup(unwrap_lora_layer(embedding_of(target_model)))  # LoRA is for the target only
        scale = getattr(target_model, "get_dflash_noise_embedding_scale", None)
        head = head_of(model, unwrap_lora_layer(lm_head_of(target_model)), block_size, embed, anchor_first)
        return cls(bundle, head, ContextKVWriter(model), embed, float(scale()) if scale else 1.0, tp_sync)

    def use_own_head(self, own: OwnHead) -> None:
        """Lets the draft choose by a head of its own; to be called before graphs are captured."""
        self._head.use_own(own)
        logger.info("The draft chooses among %d ids by a head of its own.", len(own.ids))

    def shorten_head(self, lm_head: Any, vocab_size: int, kept: list[int]) -> None:
        """Lets the head choose among fewer ids, as the variable asks; to be called before graphs are captured.

        Args:
            lm_head: the target's, as a LoRA adapter may wrap it.
            kept: ids that are always in.
        """
        draft_ids = asked(vocab_size)
        reason = self._head.why_whole
        if lm_head is not unwrap_lora_layer(lm_head):
            reason = "LoRA adapters wrap the target's head"
        if draft_ids.count is not None and reason is None:
            self.short_head = self._head.shorten(draft_ids, kept)
        if self.short_head is not None:
            message = "The draft chooses among %d of this rank's ids, the likeliest (%.1f MB of the target's head); %s."
            own = len(self.short_head.ids), self.short_head.num_bytes / 1e6
            logger.info(message, *own, f"{VARIABLE}=full takes all {vocab_size} of the vocabulary")
        else:
            why = "" if draft_ids.count is None or reason is None else f", because {reason}"
            logger.info("The draft chooses among all %d ids%s.", vocab_size, why)

    def use_mask_embedding(self, embedding: torch.Tensor | None) -> None:
        """Sets what the draft sees at a block's masks; None: the target's embedding of the mask token.

        SGLang's own worker overwrites that row of the target's table. Here, the target keeps it: a prompt may hold it.

        Args:
            embedding: [1, H] for all masks, or [K-1, H]; unscaled, like a row of the table.
        """
        self._mask_rows = None if embedding is None else embedding.to(self.runner.device, self.runner.dtype)

    def alloc_memory_pool(self, config: Any, req_to_token_pool: Any, allocator: Any) -> None:
        """Shares the target's slots, and also its slot table unless the draft has a window. So one RadixAttention tree
        serves both models."""
        window_size = get_spec().speculative_draft_window_size
        self.worker.alloc_memory_pool(
            memory_pool_config=config,
            req_to_token_pool=req_to_token_pool if window_size is None else None,
            token_to_kv_pool_allocator=allocator,
        )
        self._context_kv.bind(self.runner.token_to_kv_pool)
        if window_size is not None:
            tables = (req_to_token_pool.req_to_token, self.runner.req_to_token_pool.req_to_token)
            self.use_window(DraftWindow(window_size, get_schedule().page_size, *tables))

    def use_window(self, window: DraftWindow) -> None:
        """Lets the draft see the last tokens alone."""
        self._window = window

    def init_attention_backends(self) -> None:
        with draft_pp_context(), rows_a_request(self.model.block_size):
            self.worker.init_attention_backends()

    def init_graphs(self) -> None:
        """Captures the draft forward, head included, if SGLang captures decode graphs."""
        graphs = get_exec().graph.cuda_graph_config
        capture = graphs.decode.backend != Backend.DISABLED
        if capture and current_platform.is_out_of_tree():
            capture = current_platform.capabilities.graph_capture
        if capture and self.free_memory_gb() < MIN_GRAPH_MEMORY_GB:
            logger.warning("The draft runs without CUDA graphs: less than %.0f GB are free.", MIN_GRAPH_MEMORY_GB)
            capture = False
        if capture and self._captures_head:
            self._head.reserve(max(graphs.decode.bs))
            self.runner.capture_tail_hooks.append(self._capture_head)
        buffers, rows = own_input_buffers(PlanStream.wanted(self.runner.device)), rows_a_request(self.model.block_size)
        with draft_pp_context(), buffers, rows:
            self.worker.init_cuda_graphs(capture_decode_cuda_graph=capture)

    def _capture_head(self, runner: Any, out: Any, forward_batch: ForwardBatch, num_rows: int) -> None:
        """SGLang calls it at the end of each forward that it captures."""
        self._head(out.hidden_states, forward_batch.input_ids.view(forward_batch.batch_size, -1))

    def capture_graphs_of(self, width: int, capture: Callable[[ModelRunner], None]) -> None:
        """Lets `capture` make graphs for blocks of W rows."""
        rows = self.rows_of(width)
        self.model.set_block_size(rows)
        with draft_pp_context(), rows_a_request(rows):
            capture(self.runner)

    def warm_up(self) -> None:
        """Compiles the write of context KV, by a row in slot 0, which no request owns."""
        slot = torch.zeros(1, dtype=torch.int64, device=self.runner.device)
        weight = self.model.fc.weight
        hidden = torch.zeros((1, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        self.write_context(hidden, slot, slot)

    @property
    def compared_logits(self) -> tuple[int, torch.dtype]:
        """Columns and dtype of the logits whose argmax the head takes."""
        return self._head.compared_logits

    def free_memory_gb(self) -> float:
        """The lowest value of all ranks, because either all of them capture or none."""
        return self._tp_sync.available_memory_gb(
            SpecTpSyncSite.DFLASH_MEM, self.runner.device, self.runner.gpu_id, group=get_parallel().tp_group
        )

    def weights(self) -> WatchedRunner:
        """The runner through which SGLang updates the draft's weights."""
        return WatchedRunner(self.runner, taken_up=self._context_kv.refresh)

    def weigh_drafts(self) -> None:
        """Drafts come with their log-probabilities from now on; to be called before graphs are captured."""
        self._head.weigh_drafts()

    def give_hidden(self) -> None:
        """The draft's graphs end before its head from now on; to be called before they are captured."""
        self._captures_head = False

    def rows_of(self, width: int) -> int:
        """Rows of a block over which the draft runs, of W rows to verify."""
        return width - 1 + self._head.first_row

    def propose(
        self, block: Block, kv_plan: Any, kv_lens: tuple[torch.Tensor, int], can_run_graph: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One draft forward over the block. The next call may overwrite what it returns.

        Args:
            block: [B, R], the first R = `rows_of(W)` rows; on a CPU, of all requests of the batch or of some.
            kv_plan: the `KVLocPlan` over the block's slots.
            kv_lens: [B] int64 on the CPU, and their sum: upper bounds of the KV that the draft reads.
            can_run_graph: whether all ranks may replay a graph.

        Returns:
            [B, W-1] int64: the drafts for positions 1..W-1; and their log-probabilities, float32, after
            `weigh_drafts`, else None.
        """
        out = self._forward(block, kv_plan, *kv_lens, can_run_graph)
        head, log_probs = self._head, self._head.captured_log_probs
        if out.can_run_graph and self._captures_head:
            drafts = slice(len(block.ids)), slice(block.width - head.first_row)
            return head.captured_ids[drafts], None if log_probs is None else log_probs[drafts]
        with torch.inference_mode():
            hidden = out.logits_output.hidden_states
            return (head.draft_ids(hidden, block.ids), None) if log_probs is None else head.weighed(hidden, block.ids)

    def candidates(
        self, block: Block, kv_plan: Any, kv_lens: tuple[torch.Tensor, int], can_run_graph: bool, count: int
    ) -> ops.Drafts:
        """`propose`, with `count` ids for each position, the likelier first: [B, W-1, count]. After `give_hidden`."""
        out = self._forward(block, kv_plan, *kv_lens, can_run_graph)
        with torch.inference_mode():
            return self._head.candidates(out.logits_output.hidden_states, block.ids, count)

    def _forward(self, block: Block, kv_plan: Any, *options: Any) -> Any:
        if self.short_head is not None:
            self.short_head.exchange()
        if self.model.block_size != block.width:  # DFlash2's convolutions end at a block's first row
            self.model.set_block_size(block.width)
        forward_batch = self._forward_batch(block, *options)
        kv_plan.bind(forward_batch, self.runner.kv_index_translator)
        with torch.inference_mode():
            return self.runner.forward(forward_batch)

    def _forward_batch(
        self, block: Block, kv_lens_cpu: torch.Tensor, kv_lens_sum: int, can_run_graph: bool
    ) -> ForwardBatch:
        embeds = self._embed(block.ids)
        if self._mask_rows is not None:
            embeds[:, 1:] = self._mask_rows[: block.width - 1]
        if self._embed_scale != 1.0:
            embeds = embeds * self._embed_scale
        kv_lens = block.prefix_lens
        if self._window is not None:
            kv_lens = self._window.lay_out(block)
            kv_lens_cpu = kv_lens_cpu.clamp(max=self._window.max_len + block.width)
            kv_lens_sum = int(kv_lens_cpu.sum())
        num_rows = block.ids.numel()
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(block.ids),
            input_ids=block.ids.flatten(),
            req_pool_indices=block.req_pool_indices,
            seq_lens=kv_lens,
            out_cache_loc=block.slots.flatten(),
            seq_lens_sum=kv_lens_sum,
            seq_lens_cpu=kv_lens_cpu,
            positions=block.positions.flatten(),
            input_embeds=embeds.flatten(0, 1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._spec_infos[block.width],
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), num_rows, dtype=torch.int32, device=block.ids.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=num_rows,
            can_run_decode_cuda_graph=can_run_graph,
        )

    def slots_of(self, kv_plan: Any) -> torch.Tensor:
        """[N] int64; the write ids of a `KVLocPlan`, as ids of the draft's pool."""
        slots: torch.Tensor = kv_plan.write_ids(self.runner.kv_index_translator)
        return slots

    def write_context(self, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes the draft's KV of rows that the target has just run; see `ContextKVWriter.write`.

        Args:
            hidden: [N or more, taps * H]; SGLang may pad after the rows.
            positions, slots: [N] int64; slots of the draft's pool.
        """
        with torch.inference_mode():
            self._context_kv.write(self.runner.token_to_kv_pool, hidden, positions, slots)

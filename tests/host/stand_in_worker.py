"""Our worker over stand-ins of its two models, on any device, real or fake.

The worker, draft runner, context KV writer, head and row sampler are the real ones. Batch, KV plan and verify input are
SGLang's own classes. The two models' forwards return ready tensors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.dflash import DFlashAttention
from stand_ins import Batch, make_req, make_row_sampler

from sglang_dflash import ops
from sglang_dflash.core.policy import SameRows
from sglang_dflash.host.worker.acceptance import Acceptor
from sglang_dflash.host.worker.context_kv import ContextKVWriter
from sglang_dflash.host.worker.draft_heads import DraftHead
from sglang_dflash.host.worker.draft_input import DraftInput
from sglang_dflash.host.worker.draft_runner import DraftRunner
from sglang_dflash.host.worker.draft_window import DraftWindow
from sglang_dflash.host.worker.hidden_states import ReturnedHiddenStates
from sglang_dflash.host.worker.rows import StepRows
from sglang_dflash.host.worker.worker import DFlashWorker, WorkerParts
from sglang_dflash.ops.reference import rms_norm

BATCH, BLOCK, VOCAB, HIDDEN, TAPS, LAYERS, HEADS, DIM, COLUMNS = 3, 8, 64, 16, 3, 5, 2, 8, 64


def worker_of(
    table: torch.Tensor, kernels: ops.Kernels, sampler: Any = None, window: int | None = None
) -> DFlashWorker:
    """A worker on the table's device.

    Args:
        table: [B, COLUMNS] int32; slots of the requests' tokens.
        sampler: the host's sampler; None for greedy batches.
        window: the draft's window in tokens.
    """
    generator = torch.Generator().manual_seed(0)
    target_worker = _target(table, generator)
    tp_sync = SimpleNamespace(sync=lambda site, values: values)
    draft = _draft(table, kernels, generator, window, tp_sync)
    row_sampler = make_row_sampler(sampler, VOCAB, BLOCK, table.device.type, kernels)
    return DFlashWorker(
        WorkerParts(
            target_worker=target_worker,
            block_size=BLOCK,
            mask_token_id=VOCAB - 1,
            kernels=kernels,
            tp_sync=tp_sync,
            draft=draft,
            sampler=row_sampler,
            acceptor=Acceptor(row_sampler, kernels, tp_sync, None, one_rank=True),
            hidden_states=ReturnedHiddenStates(None),
            step_rows=StepRows(BLOCK, SameRows(BLOCK), target_worker.model_runner, draft, VOCAB - 1, kernels),
        )
    )


def _randn(generator: torch.Generator, device: Any, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(device)


def _target(table: torch.Tensor, generator: torch.Generator) -> SimpleNamespace:
    """The worker of a target whose forwards return ready logits and hidden states."""
    device = table.device
    runner = SimpleNamespace(
        device=device.type,
        dtype=torch.float32,
        model=None,
        is_draft_worker=False,
        model_config=SimpleNamespace(vocab_size=VOCAB, model_is_mrope=False, requires_mm_token_modalities=False),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        kv_index_translator=_translator(table),
        attn_backend=SimpleNamespace(init_forward_metadata=lambda batch: None),
        decode_cuda_graph_runner=None,
        lora_manager=None,
        ngram_embedding_manager=SimpleNamespace(enabled=False),
    )
    logits = _randn(generator, device, BATCH * BLOCK, VOCAB)
    hidden = _randn(generator, device, BATCH * BLOCK, TAPS * HIDDEN)

    def forward(batch: Any = None, **_: Any) -> GenerationBatchResult:
        if batch is None:  # a verify forward
            out = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
            return GenerationBatchResult(logits_output=out, can_run_cuda_graph=False)
        rows = sum(batch.extend_lens)
        out = LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden[:rows])
        slots = table[0, :rows].long()
        plan = SimpleNamespace(write_ids=lambda translator: slots)
        result = GenerationBatchResult(logits_output=out, can_run_cuda_graph=False, kv_loc_plan=plan)
        result.next_token_ids = logits[: len(batch.reqs)].argmax(-1).int()
        return result

    return SimpleNamespace(model_runner=runner, device=device.type, forward_batch_generation=forward)


def _translator(table: torch.Tensor) -> KVIndexTranslator:
    return KVIndexTranslator(
        req_to_token=table,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=1,
        device=table.device.type,
    )


class HostAttention(SimpleNamespace):
    """A draft layer's attention with the host's own methods."""

    kv_proj_only = DFlashAttention.kv_proj_only
    apply_k_norm = DFlashAttention.apply_k_norm
    apply_k_rope = DFlashAttention.apply_k_rope


def attention_of(weight: torch.Tensor, norm: torch.Tensor, rotary: SimpleNamespace, heads: int) -> SimpleNamespace:
    """What our code reads of a draft layer's attention. weight: [3 * heads * D, H]; norm: [D]."""
    return SimpleNamespace(
        qkv_proj=SimpleNamespace(weight=weight, bias=None, quant_method=UnquantizedLinearMethod()),
        k_norm=SimpleNamespace(weight=norm, variance_epsilon=1e-6),
        rotary_emb=rotary,
        attn=SimpleNamespace(k_scale=None, v_scale=None),
        num_kv_heads=heads,
        head_dim=len(norm),
        q_size=heads * len(norm),
        use_gemma_norm=False,
        v_scale=None,
    )


def _draft_model(generator: torch.Generator, device: Any) -> SimpleNamespace:
    rotary = SimpleNamespace(is_neox_style=True, cos_sin_cache=_randn(generator, device, COLUMNS, DIM))
    fc, norm = _randn(generator, device, HIDDEN, TAPS * HIDDEN), torch.ones(HIDDEN, device=device)

    def attention() -> SimpleNamespace:
        return attention_of(
            _randn(generator, device, 3 * HEADS * DIM, HIDDEN), torch.ones(DIM, device=device), rotary, HEADS
        )

    layers = [SimpleNamespace(self_attn=attention()) for _ in range(LAYERS)]
    return SimpleNamespace(layers=layers, project_target_hidden=lambda x: rms_norm(F.linear(x, fc), norm, 1e-6))


def pool_of(
    model: SimpleNamespace, slots: int, device: Any = "cpu", kind: type = MHATokenToKVPool, layout: str = "nhd"
) -> MHATokenToKVPool:
    """The host's pool with only its buffers and a plain write."""
    pool = kind.__new__(kind)
    pool.kv_cache_layout = layout
    shapes = [(slots, layer.self_attn.num_kv_heads, layer.self_attn.head_dim) for layer in model.layers]
    pool.k_buffer, pool.v_buffer = ([torch.zeros(shape, device=device) for shape in shapes] for _ in "kv")
    order = {id(layer.self_attn.attn): i for i, layer in enumerate(model.layers)}

    def set_kv_buffer(layer, location, k, v, k_scale, v_scale):
        pool.k_buffer[order[id(layer)]][location.loc] = k
        pool.v_buffer[order[id(layer)]][location.loc] = v

    pool.set_kv_buffer = set_kv_buffer
    return pool


def _draft(
    table: torch.Tensor, kernels: ops.Kernels, generator: torch.Generator, window: int | None, tp_sync: Any
) -> DraftRunner:
    device = table.device
    layers = _draft_model(generator, device)
    hidden = _randn(generator, device, BATCH * BLOCK, HIDDEN)
    out = SimpleNamespace(can_run_graph=False, logits_output=SimpleNamespace(hidden_states=hidden))
    model = SimpleNamespace(block_size=BLOCK)
    model.set_block_size = lambda rows: setattr(model, "block_size", rows)
    runner = SimpleNamespace(
        device=device.type,
        forward=lambda batch: out,
        kv_index_translator=_translator(table),
        token_to_kv_pool=pool_of(layers, BATCH * COLUMNS, device),
    )
    embedding = _randn(generator, device, VOCAB, HIDDEN)
    head = DraftHead(SimpleNamespace(weight=embedding, shard_indices=None), BLOCK)
    context_kv = ContextKVWriter(layers)
    context_kv.bind(runner.token_to_kv_pool)
    bundle = SimpleNamespace(draft_worker=None, draft_model_runner=runner, draft_model=model)
    draft = DraftRunner(bundle, head, context_kv, lambda ids: F.embedding(ids, embedding), 1.0, tp_sync)
    if window:
        draft.use_window(DraftWindow(window, 1, table, torch.zeros_like(table)))
    return draft


class StepBatch(Batch):
    """Missing fields are None, as those of a `ScheduleBatch` that a plain step leaves empty."""

    def __getattr__(self, name: str) -> None:
        return None


def decode_batch(device: Any = "cpu", **sampling: Any) -> StepBatch:
    """A batch of BATCH running requests; greedy unless `sampling` says otherwise."""
    reqs = [make_req(str(row), row, VOCAB, **({"temperature": 0.0} | sampling)) for row in range(BATCH)]
    lens = torch.tensor([5, 9, 30])
    fields = {"forward_mode": ForwardMode.DECODE, "is_extend_in_batch": False, "return_hidden_states": False}
    fields |= {"seq_lens": lens.to(device, copy=True), "seq_lens_cpu": lens, "seq_lens_sum": 44}
    batch = StepBatch(reqs, VOCAB, device, req_pool_indices=torch.arange(BATCH, device=device), **fields)
    batch.spec_info = DraftInput.create(torch.tensor([1, 2, 3], device=device), batch.seq_lens)
    return batch


def prefill_batch(device: Any = "cpu", **sampling: Any) -> StepBatch:
    """A batch of two prompts, of 5 and 9 tokens."""
    reqs = [make_req(str(row), row, VOCAB, **({"temperature": 0.0} | sampling)) for row in range(2)]
    fields = {"forward_mode": ForwardMode.EXTEND, "return_hidden_states": False, "prefix_lens": [0, 0]}
    fields |= {"extend_lens": [5, 9], "seq_lens": torch.tensor([5, 9]).to(device)}
    return StepBatch(reqs, VOCAB, device, **fields)

"""Counts the torch ops that our worker dispatches in a decode step outside the two models' forwards, box by box.

The worker, draft runner, context KV writer, head and row sampler are the real ones. Batch, KV plan and verify input are
SGLang's own classes. Not counted: the two forwards (stand-ins return ready tensors), the attention backends' metadata,
the copies into a graph's buffers, and the scheduler's work around a step (relay of bonus ids and lengths, allocation
of slots, copies of results).
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
from stand_ins import Batch, configured, make_req, make_row_sampler
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash import ops
from sglang_dflash.core.width import FullWidth
from sglang_dflash.host import draft_input
from sglang_dflash.host.context_kv import ContextKVWriter
from sglang_dflash.host.draft_input import DraftInput
from sglang_dflash.host.draft_runner import DraftHead, DraftRunner
from sglang_dflash.host.hidden_states import ReturnedHiddenStates
from sglang_dflash.host.worker import DFlashWorker

BATCH, BLOCK, VOCAB, HIDDEN, TAPS, LAYERS, HEADS, DIM, COLUMNS = 3, 8, 64, 16, 3, 5, 2, 8, 64
BOXES = {
    "block": (DFlashWorker, "_lay_out_block"),
    "KV plan": (DFlashWorker, "_plan_kv"),
    "draft": (DraftRunner, "propose"),
    "verify": (DFlashWorker, "_verify"),
    "acceptance": (DFlashWorker, "_accept"),
    "context KV": (DraftRunner, "write_context"),
    "next input": (DraftInput, "create"),
}
"""Box -> its method; an op outside all boxes counts as the step's own."""
ALIASES = {"aten._unsafe_view", "aten.detach", "aten.lift_fresh", "aten.alias", "aten._reshape_alias"}
ALLOCATIONS = {"aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided"}

WAITS = {"aten._local_scalar_dense", "aten.item", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten.masked_select"}
"""Ops that read a tensor's values on the CPU: on a device tensor, each waits for all earlier work."""


class Counting(TorchDispatchMode):
    """Classifies every dispatched op: a launch, a view, an allocation, or arithmetic on a CPU tensor of lengths."""

    def __init__(self, host: list[torch.Tensor]) -> None:
        super().__init__()
        self.box = "the step's own"
        self.found: dict[str, Counter[tuple[str, str]]] = {
            kind: Counter() for kind in ("launch", "view", "allocation", "host")
        }
        self._host = list(host)  # kept alive, because they are compared by identity

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func._schema.name.split('::')[-1]}"
        tensors = [one for one in [*args, *(kwargs or {}).values()] if isinstance(one, torch.Tensor)]
        if name == "aten.lift_fresh":  # made from Python numbers
            self._host += tensors
        if tensors and all(any(one is held for held in self._host) for one in tensors):
            kind = "host"
            if isinstance(out, torch.Tensor):
                self._host.append(out)
        elif name in ALLOCATIONS:
            kind = "allocation"
        else:
            kind = "view" if name in ALIASES or (func.is_view and _shares(out, tensors)) else "launch"
        self.found[kind][self.box, name] += 1
        return out

    def listed(self, kind: str) -> str:
        lines = []
        for box in dict.fromkeys(box for box, _ in self.found[kind]):
            names = [f"{name}{f' x{n}' if n > 1 else ''}" for (b, name), n in self.found[kind].items() if b == box]
            lines.append(f"  {box}: {', '.join(names)}")
        return f"{kind}: {self.found[kind].total()}\n" + "\n".join(lines)


def _shares(out: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether an op that may alias did alias; a cast or a reshape may also copy."""
    first = out[0] if isinstance(out, tuple | list) else out
    return any(first.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in tensors)


def _target(table: torch.Tensor, generator: torch.Generator) -> tuple[SimpleNamespace, SimpleNamespace]:
    """The runner and worker of a target whose verify forward returns ready logits and hidden states."""
    runner = SimpleNamespace(
        device="cpu",
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
    logits = torch.randn(BATCH * BLOCK, VOCAB, generator=generator)
    hidden = torch.randn(BATCH * BLOCK, TAPS * HIDDEN, generator=generator)

    def forward(**_: Any) -> GenerationBatchResult:
        out = LogitsProcessorOutput(next_token_logits=logits, hidden_states=hidden)
        return GenerationBatchResult(logits_output=out, can_run_cuda_graph=False)

    return runner, SimpleNamespace(model_runner=runner, forward_batch_generation=forward)


def _translator(table: torch.Tensor) -> KVIndexTranslator:
    return KVIndexTranslator(
        req_to_token=table, token_to_kv_pool_allocator=None, token_to_kv_pool=None, page_size=1, device="cpu"
    )


def _draft_model(rows: ops.RowOps, generator: torch.Generator) -> SimpleNamespace:
    rotary = SimpleNamespace(is_neox_style=True, cos_sin_cache=torch.randn(COLUMNS, DIM, generator=generator))
    fc, norm = torch.randn(HIDDEN, TAPS * HIDDEN, generator=generator), torch.ones(HIDDEN)

    def attention() -> SimpleNamespace:
        return SimpleNamespace(
            qkv_proj=SimpleNamespace(weight=torch.randn(3 * HEADS * DIM, HIDDEN, generator=generator), bias=None),
            k_norm=SimpleNamespace(weight=torch.ones(DIM), variance_epsilon=1e-6),
            rotary_emb=rotary,
            attn=SimpleNamespace(k_scale=None, v_scale=None),
            num_kv_heads=HEADS,
            head_dim=DIM,
            q_size=HEADS * DIM,
        )

    layers = [SimpleNamespace(self_attn=attention()) for _ in range(LAYERS)]
    return SimpleNamespace(layers=layers, project_target_hidden=lambda x: rows.rms_norm(F.linear(x, fc), norm, 1e-6))


def _pool(model: SimpleNamespace) -> MHATokenToKVPool:
    """The host's pool with only its buffers and a plain write."""
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.kv_cache_layout = "nhd"
    pool.k_buffer, pool.v_buffer = ([torch.zeros(BATCH * COLUMNS, HEADS, DIM) for _ in range(LAYERS)] for _ in "kv")
    order = {id(layer.self_attn.attn): i for i, layer in enumerate(model.layers)}

    def set_kv_buffer(layer, location, k, v, k_scale, v_scale):
        pool.k_buffer[order[id(layer)]][location.loc] = k
        pool.v_buffer[order[id(layer)]][location.loc] = v

    pool.set_kv_buffer = set_kv_buffer
    return pool


def _draft(table: torch.Tensor, rows: ops.RowOps, generator: torch.Generator) -> DraftRunner:
    model = _draft_model(rows, generator)
    hidden = torch.randn(BATCH * BLOCK, HIDDEN, generator=generator)
    out = SimpleNamespace(can_run_graph=False, logits_output=SimpleNamespace(hidden_states=hidden))
    runner = DraftRunner.__new__(DraftRunner)
    runner.runner = SimpleNamespace(
        device="cpu", forward=lambda batch: out, kv_index_translator=_translator(table), token_to_kv_pool=_pool(model)
    )
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    runner._embed, runner._embed_scale = lambda ids: F.embedding(ids, embedding), 1.0
    runner._head = DraftHead(SimpleNamespace(weight=embedding, shard_indices=None), BLOCK)
    runner._context_kv = ContextKVWriter(model)
    runner._context_kv.bind(runner.runner.token_to_kv_pool)
    runner._window = None
    runner._spec_infos = {BLOCK: make_draft_block_spec_info(draft_token_num=BLOCK, device="cpu")}
    return runner


def _worker(table: torch.Tensor, rows: ops.RowOps) -> DFlashWorker:
    generator = torch.Generator().manual_seed(0)
    worker = DFlashWorker.__new__(DFlashWorker)
    worker._target, worker._target_worker = _target(table, generator)
    worker.device, worker.block_size, worker._mask_token_id = "cpu", BLOCK, VOCAB - 1
    worker._draft = _draft(table, rows, generator)
    worker._sampler = make_row_sampler(None, VOCAB, BLOCK)
    worker._hidden_states = ReturnedHiddenStates(None)
    worker._rows, worker._accept_chain, worker._fuses_acceptance = rows, ops.accept_chain, True
    worker._widths = FullWidth(BLOCK)
    return worker


class DecodeBatch(Batch):
    """Missing fields are None, as those of a `ScheduleBatch` that a plain step leaves empty."""

    def __getattr__(self, name: str) -> None:
        return None


def _batch() -> DecodeBatch:
    reqs = [make_req(str(row), row, VOCAB, temperature=0.0) for row in range(BATCH)]
    lens = torch.tensor([5, 9, 30])
    fields = {"forward_mode": ForwardMode.DECODE, "is_extend_in_batch": False, "return_hidden_states": False}
    fields |= {"seq_lens": lens.clone(), "seq_lens_cpu": lens, "seq_lens_sum": int(lens.sum())}
    batch = DecodeBatch(reqs, VOCAB, req_pool_indices=torch.arange(BATCH), **fields)
    batch.spec_info = DraftInput.create(torch.tensor([1, 2, 3]), lens)
    return batch


@contextmanager
def _in_boxes(monkeypatch: pytest.MonkeyPatch, counting: Counting):
    """Tells `counting` in which box an op is dispatched."""
    with monkeypatch.context() as patch:
        for box, (owner, name) in BOXES.items():
            method = getattr(owner, name)

            def within(*args: Any, box: str = box, method: Any = method) -> Any:
                outer, counting.box = counting.box, box
                try:
                    return method(*args)
                finally:
                    counting.box = outer

            patch.setattr(owner, name, staticmethod(within) if owner is DraftInput else within)
        patch.setattr(torch, "inference_mode", torch.no_grad)  # would hide the parts of composite ops
        with counting:
            yield


@pytest.mark.parametrize(("bodies", "launches"), [("native", 12), ("torch", 56)])
def test_launches_of_a_step(bodies, launches, monkeypatch):
    """Fails where a step dispatches more ops outside the forwards than before (a copy, a cast, arithmetic): each is a
    launch on a device. If there are fewer, lower the number."""
    if bodies == "torch":
        monkeypatch.setattr(ops, "serves", lambda *_: False)
    elif not ops.serves("cpu", torch.float32):
        pytest.skip("the native ops are not built")
    rows = ops.choose_rows("cpu", torch.float32) if bodies == "native" else ops.TORCH_ROWS
    table = torch.arange(BATCH * COLUMNS, dtype=torch.int32).view(BATCH, COLUMNS)
    published = []
    group = SimpleNamespace(world_size=1, rank_in_group=0, device_group=None)
    with configured(), get_parallel().override(tp_group=group), torch.no_grad():
        worker, batch = _worker(table, rows), _batch()
        counting = Counting([batch.seq_lens_cpu])
        with _in_boxes(monkeypatch, counting):
            result = worker.forward_batch_generation(batch, published.append)
    assert torch.equal(published[0], torch.tensor([5, 9, 30]) + result.accept_lens)
    print(f"{bodies} bodies, batch {BATCH}, block {BLOCK}, {LAYERS} draft layers")
    for kind in counting.found:
        print(counting.listed(kind))
    assert counting.found["launch"].total() <= launches, counting.listed("launch")
    assert not {name for _, name in counting.found["launch"]} & WAITS, "the CPU waits for the device in a step"


def test_the_reservation_before_a_step_launches_nothing(monkeypatch):
    """Fails where reserving slots does more on the device than two copies of lengths to it, or waits for it. The
    host's allocation itself is left out."""
    uploaded: list[torch.Tensor] = []
    monkeypatch.setattr(draft_input, "upload", lambda tensor, device: uploaded.append(tensor))
    monkeypatch.setattr(draft_input, "alloc_for_spec_decode", lambda *_, **__: None)
    monkeypatch.setattr(draft_input, "get_alloc_reserve_per_decode", lambda: 2 * BLOCK)
    with configured():
        batch = _batch()
    for req in batch.reqs:
        req.kv.kv_committed_len = req.kv.kv_allocated_len = 9
    batch.token_to_kv_pool_allocator = SimpleNamespace(page_size=1)
    batch.req_to_token_pool = SimpleNamespace(req_to_token=torch.empty(BATCH, COLUMNS, dtype=torch.int32))
    batch.maybe_evict_swa = lambda: None
    counting = Counting([])
    with counting:
        batch.spec_info.prepare_for_decode(batch)
    assert batch.spec_info.nxt_kv_lens_cpu.tolist() == [9 + 2 * BLOCK] * BATCH
    print(counting.listed("host"))
    assert len(uploaded) == 2
    assert not counting.found["launch"], counting.listed("launch")

"""Our worker's decode steps over a target and a draft that are attention layers on SGLang's fa3 backend.

Worker, draft runner and draft window are ours as they are; their two forwards run the layers of `fa3_models`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, get_req_to_token_extra_context_len
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from host.stand_ins import Batch, configured, make_req, one_rank
from rehearsal.fa3_models import (
    BLOCK,
    CONTEXT,
    GRAPH_SIZES,
    REQUESTS,
    VOCAB,
    AttentionModel,
    Graphs,
    Layer,
    PackedGraphs,
    Setup,
)
from sglang_dflash import ops
from sglang_dflash.core.policy import Drafting, SameRows
from sglang_dflash.host.start.hooks import _row_headroom
from sglang_dflash.host.worker.acceptance import Acceptor
from sglang_dflash.host.worker.draft_input import DraftInput, reserve_lens
from sglang_dflash.host.worker.draft_runner import DraftRunner
from sglang_dflash.host.worker.draft_window import DraftWindow
from sglang_dflash.host.worker.rows import StepRows
from sglang_dflash.host.worker.trimmed_rows import TrimmedRows
from sglang_dflash.host.worker.worker import DFlashWorker, WorkerParts

TARGET_LAYERS = (Layer(), Layer(left=20))
DRAFT_LAYERS = (Layer(causal=False), Layer(left=20), Layer(left=20, causal=False))


class Step(Batch):
    """What our worker reads of a `ScheduleBatch` in a decode step; other fields are None, as in a plain step."""

    def __getattr__(self, name: str) -> None:
        return None


class Forced:
    """A policy that says what a test has set; its chances are the draft's own."""

    weighs, drafting = True, Drafting(1, [], 0)

    def draft(self, names: Sequence[str]) -> Drafting:
        return self.drafting

    def offsets(self, names: Sequence[str], depths: int) -> np.ndarray:
        return np.zeros((len(names), depths), np.float32)

    def learn(self, *_: Any) -> None:
        pass

    see_draft = see_rest = learn


class Rig:
    """Our worker over the two models. `step` runs one decode step and leaves the outputs in `target` and `draft`."""

    def __init__(self, setup: Setup, widen: bool = True) -> None:
        self.setup, self.policy = setup, Forced()
        self.counts: list[int] = []  # verified rows of each request of the last step
        width = CONTEXT + _row_headroom(get_req_to_token_extra_context_len)
        tables = [ReqToTokenPool(REQUESTS, width, "cpu", False) for _ in range(2)]
        self.target = AttentionModel(setup, TARGET_LAYERS, tables[0], 1, is_draft=False)
        draft_table = tables[0] if setup.draft_window is None else tables[1]
        self.draft = AttentionModel(setup, DRAFT_LAYERS, draft_table, 2, is_draft=True)
        self.slots, self.unread = self._lay_out_slots(width)
        self.worker = self._make_worker()
        if widen:
            self.worker.init_attention_backends()
        if setup.graphs:
            self.draft.runner.decode_cuda_graph_runner = Graphs(self.draft)
            graphs = (PackedGraphs if setup.packed else Graphs)(self.target)
            self.target.runner.decode_cuda_graph_runner = graphs
            self.worker.step_rows.use_graphs(None)

    def _lay_out_slots(self, width: int) -> tuple[torch.Tensor, int]:
        """Gives every row of the table but the first its pages, in no order. [rows, width] int64, and a slot of no row.

        In a pool of its own, a sliding layer's pages stand in another order.
        """
        page, generator = self.setup.page_size, torch.Generator().manual_seed(3)
        columns = -(-width // page)
        last = self.target.pages
        pages = (torch.randperm(last - 1, generator=generator) + 1).view(REQUESTS, columns)
        slots = (pages[:, :, None] * page + torch.arange(page)).flatten(1)[:, :width]
        if isinstance(self.target.pool, SWAKVPool):
            moved = torch.randperm(last, generator=generator) + 1
            mapping = self.target.pool.full_to_swa_index_mapping
            mapping[page:-1] = (moved[:, None] * page + torch.arange(page)).flatten()
            mapping[-1] = -1
        return torch.cat((torch.zeros_like(slots[:1]), slots)), last * page

    def _make_worker(self) -> DFlashWorker:
        target_worker = SimpleNamespace(
            model_runner=self.target.runner, device="cuda", forward_batch_generation=self._verify
        )
        sampler = SimpleNamespace(is_plain_greedy=lambda batch: True, commit=_nothing, grammar_tree=_nothing)
        draft, kernels = self._make_draft_runner(), ops.TORCH_KERNELS
        one_rank_sync = SimpleNamespace(sync=lambda site, values: values)
        parts = (self.target.runner, draft, VOCAB - 1, kernels)
        same = not self.setup.packed
        step_rows = StepRows(BLOCK, SameRows(BLOCK), *parts) if same else TrimmedRows(BLOCK, self.policy, *parts)
        return DFlashWorker(
            WorkerParts(
                target_worker=target_worker,
                block_size=BLOCK,
                mask_token_id=VOCAB - 1,
                kernels=kernels,
                tp_sync=None,
                draft=draft,
                sampler=sampler,
                acceptor=Acceptor(sampler, kernels, one_rank_sync, None, one_rank=True),
                hidden_states=SimpleNamespace(put=_nothing),
                step_rows=step_rows,
            )
        )

    def _make_draft_runner(self) -> DraftRunner:
        runner = self.draft.runner
        runner.forward = self._propose
        ids = torch.zeros(max(GRAPH_SIZES), BLOCK - 1, dtype=torch.int64)
        log_probs = torch.zeros(ids.shape) if self.setup.packed else None
        head = SimpleNamespace(
            first_row=1,
            captured_ids=ids,
            captured_log_probs=log_probs,
            draft_ids=lambda hidden, block: ids[: len(hidden)],
            weighed=lambda hidden, block: (ids[: len(hidden)], log_probs[: len(hidden)]),
            weigh_drafts=_nothing,
        )
        model = SimpleNamespace(block_size=BLOCK)
        bundle = SimpleNamespace(draft_worker=None, draft_model_runner=runner, draft_model=model)
        context_kv = SimpleNamespace(write=_nothing)
        draft = DraftRunner(bundle, head, context_kv, lambda ids: torch.zeros(*ids.shape, 1), 1.0, None)
        draft.init_attention_backends = _nothing  # made in `AttentionModel`
        if self.setup.draft_window is not None:
            tables = (self.target.table_pool.req_to_token, self.draft.table_pool.req_to_token)
            draft.use_window(DraftWindow(self.setup.draft_window, self.setup.page_size, *tables))
        return draft

    def _propose(self, forward_batch: ForwardBatch) -> SimpleNamespace:
        replayed = self.draft.forward(forward_batch)
        hidden = torch.zeros(forward_batch.batch_size, 1)
        return SimpleNamespace(can_run_graph=replayed, logits_output=SimpleNamespace(hidden_states=hidden))

    def _verify(self, forward_batch: ForwardBatch, **_: Any) -> GenerationBatchResult:
        replayed = self.target.forward(forward_batch)
        layout = forward_batch.spec_info.ragged_verify_layout
        self.counts = [BLOCK] * forward_batch.batch_size if layout is None else layout.verify_lens.tolist()
        logits = torch.zeros(len(forward_batch.input_ids), VOCAB)
        out = LogitsProcessorOutput(next_token_logits=logits, hidden_states=torch.zeros(len(logits), 1))
        return GenerationBatchResult(logits_output=out, can_run_cuda_graph=replayed)

    def hold(self, rows: torch.Tensor, prefix_lens: torch.Tensor, reserved: Sequence[int]) -> None:
        """The state before a step: committed KV, and reserved slots in the table. All other entries lead to NaN."""
        for pool in {id(one.table_pool): one.table_pool for one in (self.target, self.draft)}.values():
            pool.req_to_token.fill_(self.unread)
            pool.req_to_token[0] = 0
        for row, length in zip(rows.tolist(), reserved, strict=True):
            self.target.table_pool.req_to_token[row, :length] = self.slots[row, :length]
        for one in (self.target, self.draft):
            one.hold(self.slots, rows, prefix_lens)

    def step(self, rows: Sequence[int], prefix_lens: Sequence[int]) -> None:
        """One step of requests with these rows of the table. The host is a whole block behind where it overlaps."""
        rows, lens = torch.tensor(rows), torch.tensor(prefix_lens)
        behind = 0 if self.setup.knows_lens else BLOCK
        committed = [max(length - behind, 0) for length in prefix_lens]
        reserve = get_alloc_reserve_per_decode()
        reserved = reserve_lens(committed, [0] * len(rows), reserve, self.setup.page_size)
        self.hold(rows, lens, reserved)
        known = lens if self.setup.knows_lens else None
        fields = {"forward_mode": ForwardMode.DECODE, "is_extend_in_batch": False, "return_hidden_states": False}
        fields |= {"seq_lens": lens.clone(), "seq_lens_cpu": known, "req_pool_indices": rows}
        fields |= {"seq_lens_sum": None if known is None else int(known.sum())}
        reqs = [make_req(str(row), row, VOCAB, temperature=0.0) for row in rows.tolist()]
        batch = Step(reqs, VOCAB, **fields)
        batch.spec_info = DraftInput.create(torch.ones(len(rows), dtype=torch.int64), lens)
        batch.spec_info.nxt_kv_lens_cpu = torch.tensor(reserved)
        batch.spec_info.nxt_kv_lens_sum = sum(reserved)
        self.worker.forward_batch_generation(batch)


def _nothing(*_: Any, **__: Any) -> None:
    return None


@contextmanager
def rig(setup: Setup, widen: bool = True) -> Iterator[Rig]:
    """`widen`: whether our worker mends the host's page tables at the start."""
    config = {"page_size": setup.page_size, "speculative_num_draft_tokens": BLOCK}
    with configured(**config), one_rank(), torch.no_grad():
        yield Rig(setup, widen)

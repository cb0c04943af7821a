"""Attention layers over SGLang's real fa3 backend on the CPU: eager, and as graphs keep them.

Real are the backend, its Triton kernels (interpreted), KV pools, slot tables, KV plans, and the buffers of the graph
runner. The kernel itself is `flash_attn_stub`. A model is only attention layers: queries, keys and values are drawn
beforehand for every position of every request, so that a test can compute what each row must see. Slots that hold
nothing a step may read are NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, build_capture_verify_lens
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from rehearsal import flash_attn_stub

flash_attn_stub.install()
from sglang.srt.layers.attention import flashattention_backend  # noqa: E402 imports the kernels

BLOCK, CONTEXT, REQUESTS, HEADS, KV_HEADS, DIM, VOCAB = 8, 128, 6, 4, 2, 16, 32
GRAPH_SIZES = (1, 2, 4)
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer. `left`: keys to the left of its own that a row sees; -1 for all."""

    left: int = -1
    causal: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    """What a user may choose, and how far the host lags.

    Fields:
        draft_window: `--speculative-draft-window-size`.
        swa_pool: the target's sliding layers have a pool of their own (SGLang's hybrid SWA).
        knows_lens: the host knows lengths on the CPU, as without overlap.
        packed: of each block the first rows are verified, as `TrimmedRows` chooses them.
    """

    page_size: int
    graphs: bool
    draft_window: int | None = None
    swa_pool: bool = False
    knows_lens: bool = False
    packed: bool = False


class AttentionModel:
    """One model: its pool, slot table, backend and layers.

    Fields:
        queries: [layers, rows, positions, HEADS, DIM]; rows are those of the slot table.
        keys, values: [layers, rows, positions, KV_HEADS, DIM].
        outputs: [layers, T, HEADS, DIM] of the last forward.
    """

    def __init__(self, setup: Setup, layers: Sequence[Layer], table: ReqToTokenPool, seed: int, is_draft: bool) -> None:
        self.setup, self.layers, self.table_pool = setup, layers, table
        rows, width = table.req_to_token.shape
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn(len(layers), rows, width, HEADS + 2 * KV_HEADS, DIM, generator=generator).to(DTYPE)
        self.queries, self.keys, self.values = made.split([HEADS, KV_HEADS, KV_HEADS], 3)
        self.pages = (rows - 1) * -(-width // setup.page_size) + 1  # of requests, and one that nobody may read
        self.pool = self._make_pool(is_draft)
        self.modules = [self._module(index, layer) for index, layer in enumerate(layers)]
        self.runner = self._make_runner(is_draft)
        self.backend = flashattention_backend.FlashAttentionBackend(self.runner)
        self.runner.attn_backend = self.backend
        self.outputs = torch.empty(0)

    @property
    def slots(self) -> int:
        return self.pages * self.setup.page_size

    def _make_pool(self, is_draft: bool) -> Any:
        shape = {"dtype": DTYPE, "head_num": KV_HEADS, "head_dim": DIM, "device": "cpu", "enable_memory_saver": False}
        if is_draft or not self.setup.swa_pool:
            return MHATokenToKVPool(self.slots, self.setup.page_size, layer_num=len(self.layers), **shape)
        sliding = [index for index, layer in enumerate(self.layers) if layer.left >= 0]
        full = [index for index in range(len(self.layers)) if index not in sliding]
        pool = SWAKVPool(
            self.slots,
            self.slots,
            self.setup.page_size,
            swa_attention_layer_ids=sliding,
            full_attention_layer_ids=full,
            **shape,
        )
        pool.register_mapping(torch.zeros(self.slots + self.setup.page_size + 1, dtype=torch.int64))
        return pool

    def _module(self, index: int, layer: Layer) -> RadixAttention:
        kind = AttentionType.DECODER if layer.causal else AttentionType.ENCODER_ONLY
        return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, index, sliding_window_size=layer.left, attn_type=kind)

    def _make_runner(self, is_draft: bool) -> SimpleNamespace:
        """What a backend, and a batch made for it, read of the host's `ModelRunner`."""
        config = SimpleNamespace(
            is_encoder_decoder=False,
            context_len=CONTEXT,
            attention_arch=AttentionArch.MHA,
            head_dim=DIM,
            hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
            get_num_kv_heads=lambda ranks: KV_HEADS,
            is_local_attention_model=False,
            vocab_size=VOCAB,
            model_is_mrope=False,
            requires_mm_token_modalities=False,
        )
        translator = KVIndexTranslator(
            req_to_token=self.table_pool.req_to_token,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=self.pool,
            page_size=self.setup.page_size,
            device="cpu",
            is_draft_worker=is_draft,
        )
        return SimpleNamespace(
            model_config=config,
            device="cpu",
            dtype=DTYPE,
            model=None,
            is_draft_worker=is_draft,
            sliding_window_size=max(layer.left for layer in self.layers),
            page_size=self.setup.page_size,
            kv_cache_dtype=DTYPE,
            kv_cache_dtype_str="auto",
            req_to_token_pool=self.table_pool,
            token_to_kv_pool=self.pool,
            kv_index_translator=translator,
            decode_cuda_graph_runner=None,
            lora_manager=None,
            ngram_embedding_manager=SimpleNamespace(enabled=False),
        )

    def buffers(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool.get_kv_buffer(index)

    def slots_of(self, index: int, slots: torch.Tensor) -> torch.Tensor:
        """The layer's slots for slots of the table."""
        own_pool = isinstance(self.pool, SWAKVPool) and self.layers[index].left >= 0
        return self.pool.full_to_swa_index_mapping[slots] if own_pool else slots

    def hold(self, slots: torch.Tensor, rows: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        """Leaves only the KV of committed tokens in the pool, and zeros on page 0, which padded rows write and read.

        slots: [rows of the table, positions] int64.
        """
        for index in range(len(self.layers)):
            for buffer, content in zip(self.buffers(index), (self.keys, self.values), strict=True):
                buffer.fill_(torch.nan)
                buffer[: self.setup.page_size] = 0
                for row, length in zip(rows.tolist(), prefix_lens.tolist(), strict=True):
                    buffer[self.slots_of(index, slots[row, :length])] = content[index, row, :length]

    def attend(self, forward_batch: Any) -> None:
        """The layers' attention over the rows of a batch, with the metadata that the backend holds."""
        rows, at = _requests(forward_batch), forward_batch.positions
        outputs = []
        for index, module in enumerate(self.modules):
            made = (one[index, rows, at].flatten(1) for one in (self.queries, self.keys, self.values))
            q, k, v = (one.contiguous() for one in made)
            k, v = (one.view(-1, KV_HEADS, DIM) for one in (k, v))
            outputs.append(self.backend.forward_extend(q, k, v, module, forward_batch))
        self.outputs = torch.stack(outputs).view(len(outputs), -1, HEADS, DIM)

    def forward(self, forward_batch: ForwardBatch) -> bool:
        """As the host's runner: replays a graph if there are graphs. Whether it did."""
        graphs = self.runner.decode_cuda_graph_runner
        if graphs is not None:
            graphs.load_batch(forward_batch)  # again, if a verify loaded it already
            graphs.replay(forward_batch)
        else:
            self.backend.init_forward_metadata(forward_batch)
            self.attend(forward_batch)
        return graphs is not None


def _requests(forward_batch: Any) -> torch.Tensor:
    """[T] int64: the row of the slot table for each row of a batch; a graph's padding is of its last requests."""
    layout, requests = forward_batch.spec_info.ragged_verify_layout, forward_batch.req_pool_indices
    if layout is None:
        return requests.repeat_interleave(BLOCK)
    return requests.repeat_interleave(layout.padded_to_bucket(padded_bs=len(requests)).verify_lens)


class Graphs:
    """The host's `DecodeCudaGraphRunner` as far as attention goes: static buffers, and metadata captured by size.

    A replay uses the tensors that the capture has seen, whatever the backend holds by then, as a CUDA graph does.
    """

    def __init__(self, model: AttentionModel) -> None:
        self.model, backend = model, model.backend
        self.fill = backend.get_cuda_graph_seq_len_fill_value()
        largest = max(GRAPH_SIZES)
        backend.init_cuda_graph_state(largest, largest * BLOCK)
        self.registry = build_decode_registry(
            device=torch.device("cpu"),
            max_bs=largest,
            max_num_token=largest * BLOCK,
            seq_len_fill_value=self.fill,
            cache_loc_dtype=torch.int64,
            share_pool=False,
        )
        names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu")
        self.buffers = SimpleNamespace(mamba_track_indices=None, encoder_lens=None)
        for name in names:
            setattr(self.buffers, name, self.registry.get_slot(name).buffer)
        self.buffers.seq_lens.fill_(self.fill)
        self.buffers.seq_lens_cpu.fill_(self.fill)
        self.captured = {rows: self._capture(rows) for rows in self._sizes()}
        self.rows = 0

    def _sizes(self) -> list[int]:
        """Rows of each graph."""
        return [size * BLOCK for size in GRAPH_SIZES]

    def _slots(self, rows: int) -> int:
        """Requests of the graph of so many rows."""
        return rows // BLOCK

    def _layout(self, rows: int) -> Any:
        """The host's `RaggedVerifyLayout` of a capture, if rows are packed."""
        return None

    def _capture(self, rows: int) -> tuple[ForwardBatch, Any]:
        size, buffers = self._slots(rows), self.buffers
        verify_input = DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=BLOCK)
        verify_input.ragged_verify_layout = self._layout(rows)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=buffers.input_ids[:rows],
            req_pool_indices=buffers.req_pool_indices[:size],
            seq_lens=buffers.seq_lens[:size],
            seq_lens_cpu=buffers.seq_lens_cpu[:size],
            seq_lens_sum=size * self.fill,
            out_cache_loc=buffers.out_cache_loc[:rows],
            positions=buffers.positions[:rows],
            spec_info=verify_input,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
        )
        self.model.runner.kv_index_translator.bind_runner_slots(batch)
        self.model.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.model.attend(batch)
        return batch, dataclasses.replace(self.model.backend.forward_metadata)

    def _size_of(self, forward_batch: ForwardBatch) -> int:
        """Rows of the graph that the batch replays."""
        return next(rows for rows in self.captured if rows >= len(forward_batch.input_ids))

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        return forward_batch.batch_size <= max(GRAPH_SIZES)

    def load_batch(self, forward_batch: ForwardBatch) -> None:
        batch = forward_batch.batch_size
        self.rows = self._size_of(forward_batch)
        size = self._slots(self.rows)
        self.registry.fill_from(
            forward_batch,
            raw_bs=batch,
            padded_bs=size,
            raw_num_tokens=len(forward_batch.input_ids),
            padded_num_tokens=self.rows,
        )
        view = build_replay_fb_view(
            forward_batch=forward_batch,
            buffers=self.buffers,
            bs=size,
            raw_bs=batch,
            num_tokens=self.rows,
            global_num_tokens_cpu=None,
            seq_len_fill_value=self.fill,
            capture_forward_mode=ForwardMode.TARGET_VERIFY,
            is_encoder_decoder=False,
        )
        self.model.backend.init_forward_metadata_out_graph(view)

    def replay(self, forward_batch: ForwardBatch) -> None:
        batch, metadata = self.captured[self.rows]
        batch.spec_info.ragged_verify_layout = forward_batch.spec_info.ragged_verify_layout
        self.model.backend.forward_metadata = metadata
        self.model.attend(batch)
        self.model.outputs = self.model.outputs[:, : len(forward_batch.input_ids)]


class PackedGraphs(Graphs):
    """Graphs of fixed numbers of rows, each of up to as many requests as the largest batch has."""

    def __init__(self, model: AttentionModel) -> None:
        self.capture_num_tokens, self.max_bs = self._sizes(), max(GRAPH_SIZES)
        super().__init__(model)

    def _slots(self, rows: int) -> int:
        return min(rows, self.max_bs)

    def _layout(self, rows: int) -> Any:
        slots = self._slots(rows)
        lens = build_capture_verify_lens(num_tokens=rows, num_slots=slots, num_draft_tokens=BLOCK)
        grid = self.capture_num_tokens
        return RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lens, device=torch.device("cpu"), grid=grid)

    def can_run_graph(self, forward_batch: ForwardBatch) -> bool:
        size = forward_batch.spec_info.ragged_verify_layout.graph_num_tokens
        return size in self.captured and forward_batch.batch_size <= self._slots(size)

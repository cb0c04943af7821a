"""Some rows of whole blocks on CUDA: the CPU chooses how many a step verifies, and the device which.

Graphs of fixed numbers of rows verify them. Only a step with logprobs, logit
processors or sampling masks waits for the device.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.utils.common import is_sm100_supported

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyRows
from sglang_dflash.host.patches import packed_gdn
from sglang_dflash.host.start.widths import attention_backends
from sglang_dflash.host.worker.device_rows import DeviceRows
from sglang_dflash.host.worker.protocols import ModelRunner

BACKENDS = {"fa3"} | ({"trtllm_mha"} if is_sm100_supported() else set())
"""Attention backends whose graphs verify packed rows; the kernels of trtllm_mha do so on SM100 alone."""
DENSE_GDN = {"Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"}
"""Targets with gated delta nets and without experts. The smallest graph has K rows, so a step without drafts has as
many: one width for all is better where each row needs experts of its own."""


def can_trim(cfg: Any, target: ModelRunner) -> bool:
    """Whether the target's graphs can verify some rows of each block. cfg: SGLang's view of the server arguments."""
    model, backends = target.model_config, attention_backends(cfg)
    slides = model.is_hybrid_swa or (target.sliding_window_size or 0) > 0
    return (
        not cfg.disable_cuda_graph_padding
        and backends <= BACKENDS
        and not (slides and "trtllm_mha" in backends)  # no rehearsal has shown its windows over packed rows
        and not cfg.enable_linear_replayssm_spec  # nor a ring of updates over them
        and (mambaish_config(model) is None or DENSE_GDN.issuperset(model.hf_config.architectures))
        and model.attention_arch != AttentionArch.MLA
        and not model.is_encoder_decoder
        and not model.is_local_attention_model
    )


class TrimmedRows(DeviceRows):
    """Blocks of K rows are drafted for everybody; the likeliest of their rows are verified, as many as pay.

    Under tensor parallelism, all ranks choose by the first rank's chances.
    """

    made = False
    """Whether this process has one: then the target's graphs are of fixed numbers of rows."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        TrimmedRows.made = True
        self._sizes: list[int] = []  # rows of the target's graphs, rising
        self._slots = 0  # requests of the largest
        self._group = get_parallel().tp_group

    def use_graphs(self, prepare: Any) -> None:
        runner = self._target.decode_cuda_graph_runner
        self._sizes, self._slots = list(runner.capture_num_tokens), runner.max_bs
        packed_gdn.allow_graphs(self._target.attn_backend)

    def size_for(self, rows: int) -> int:
        """Rows of the smallest graph with room for so many; the rows themselves if none has."""
        place = bisect_left(self._sizes, rows)
        return self._sizes[place] if place < len(self._sizes) else rows

    def warm_up(self) -> None:
        """Compiles SGLang's kernels that lay packed rows out, for every number of requests."""
        runner, most = self._target.decode_cuda_graph_runner, self._target.max_running_requests
        powers = [1 << place for place in range(most.bit_length() + 1)]
        for count in {one for power in powers for one in (power, max(1, power - 1))}:
            _layout(torch.ones(count, dtype=torch.int32, device=self._device), count)
        for size in runner.capture_num_tokens:
            slots = min(size, runner.max_bs)
            for count in {1, 2, 16, slots}:
                lens = torch.ones(min(count, slots), dtype=torch.int32, device=self._device)
                _layout(lens, size).padded_to_bucket(padded_bs=slots)

    def _block_width(self) -> int:
        return self._block_size

    def _plain(self, block: Block) -> VerifyRows:
        return VerifyRows.of(block, block.ids, self._whole_rows(len(block.ids), 1))

    def _verified(self, block: Block, ids: torch.Tensor, survival: torch.Tensor) -> VerifyRows:
        if self._group.world_size > 1:  # ranks that read chances differently would add up rows of different requests
            self._group.broadcast(survival, src=0)
        requests, whole = ids.shape[0], ids.numel()
        size = self.size_for(self._drafting.rows)
        fits = requests <= self._slots and size < whole
        chosen = ops.likeliest_rows(survival, size, size) if fits else self._whole_rows(requests, block.width)
        return VerifyRows.of(block, ids, chosen)

    def _whole_rows(self, requests: int, lens: int) -> ops.Rows | None:
        """The first `lens` rows of all blocks, and what else fills a graph without a free place; None: all rows of all
        blocks, in a forward that has no others."""
        count = requests * lens
        size = self.size_for(count) if requests <= self._slots else count
        if lens == self._block_size and size == count:
            return None
        each = self._same_lens(requests, lens).long()
        if requests == self._slots and size > count:  # SGLang would give all other rows of the graph to one request
            count = min(size, requests * self._block_size)
            each = each.new_full(each.shape, count // requests)
            each[: count % requests] += 1
        return ops.keep_rows(each, self._block_size, count, size)

    def _size(self, rows: VerifyRows) -> int:
        return len(rows.ids) if rows.chosen is None else rows.chosen.size

    def cap_lens(self, rows: VerifyRows) -> torch.Tensor | None:
        if self._chosen is None:  # rows that fill the graph of a plain step are no drafts
            return self._same_lens(rows.batch, 1)
        return super().cap_lens(rows)

    def verify_fields(self, rows: VerifyRows) -> dict[str, Any]:
        cols = None if rows.chosen is None else rows.chosen.padded()
        return {"kv_loc_cols": cols, "ragged_verify_layout": _layout(self._lens(rows), self._size(rows))}


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
    return bool(original(algorithm)) or (algorithm.is_dflash() and TrimmedRows.made)

"""A plugin of SGLang for tests: our CPU platform offers SGLang's own graph runner, with tapes in the place of graphs.

The file that `GRAPH_TAPE_BUG` names holds the name of a bug for the moment, or nothing. With `GRAPH_TAPE_WIDTHS`,
graphs of all widths are made in the place of those of packed rows.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

VARIABLE = "GRAPH_TAPE_BUG"
STALE_DRAFTS = "the drafts of the batch before"
REBOUND_IDS = "a rebound buffer of ids"
LIVE_PADDING = "padding that writes a live slot"
OTHER_LENS = "rows are laid out for the lengths of the capture"
NEIGHBOURS = "the rows of the next request"
OTHER_WIDTH = "attention is prepared for the width before"
UNMOVED, CHAIN_MASK = "accepted rows of a tree stay where they are", "rows of a tree see all rows before them"
WIDTHS = "GRAPH_TAPE_WIDTHS"


def activate() -> None:
    """Entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_cpu.detect import ATTENTION_BACKEND
    from sglang_dflash.host.start import widths
    from sglang_dflash.host.worker import trimmed_rows

    widths.on_graphs = lambda device: True
    trimmed_rows.BACKENDS = set() if WIDTHS in os.environ else {ATTENTION_BACKEND}
    setup = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
    HookRegistry.register(f"{setup}.capture_decode_graph", _capture, HookType.REPLACE)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_tp_model_worker", _offer, HookType.BEFORE)


def _offer(*_: Any) -> None:
    """Runs in the scheduler's process before it loads a model."""
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.platforms.interface import PlatformCapabilities
    from sglang.srt.speculative import dflash_utils
    from static_attention import StaticAttentionBackend
    from tape_backend import TapeGraphBackend

    from sglang_cpu.detect import ATTENTION_BACKEND
    from sglang_cpu.platform import CpuPlatform

    CpuPlatform.capabilities = PlatformCapabilities(graph_capture=True)
    CpuPlatform.get_graph_runner_cls = lambda platform: DecodeCudaGraphRunner
    CpuPlatform.get_full_graph_backend_cls = lambda platform: TapeGraphBackend
    register_attention_backend(ATTENTION_BACKEND)(StaticAttentionBackend)
    # Like triton, it verifies chains without a mask, and the host captures none for it.
    dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS |= {StaticAttentionBackend.__name__}
    # On a CPU the host replays graphs for plain decoding alone (forward_batch_info.py:283).
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    # It asks torch for the current stream of an accelerator (utils/common.py:1371), and a CPU's torch knows no capture.
    parallel_state.get_current_device_stream_fast = torch.cpu.current_stream
    torch.cpu.is_current_stream_capturing = lambda: False
    _take_an_op_of_torch()
    _rehearse_plan_stream()
    _plant_stale_drafts()
    _plant_rebound_ids()
    _plant_live_padding()
    _take_any_rows()
    _plant_errors_of_packed_rows()
    _plant_another_width()
    _plant_errors_of_trees()


def _capture(*, model_runner: Any) -> Any:
    """`capture_decode_graph`, which on a CPU captures only for torch.compile."""
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
    from sglang.srt.platforms import current_platform

    begin = time.perf_counter()
    runner = current_platform.get_graph_runner_cls()(model_runner)
    phase = "draft_decode" if model_runner.is_draft_worker else "target_verify"
    seconds = time.perf_counter() - begin
    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0.0, capture_time=seconds)


def _take_an_op_of_torch() -> None:
    """The draft's log-probabilities are computed by torch, as on CUDA: a tape does not see the native op."""
    from sglang_dflash import ops
    from sglang_dflash.ops import reference

    choose = ops.choose_kernels
    ops.choose_kernels = lambda *given: replace(choose(*given), best_log_probs=reference.best_log_probs)


def _rehearse_plan_stream() -> None:
    """With SGLang's variable, the draft's graph runs as late as a plan stream lets it: after all work beside it."""
    from sglang.srt.environ import envs
    from tape_backend import TapeGraphBackend

    from sglang_dflash.host.worker.plan_stream import PlanStream

    if not envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return
    TapeGraphBackend.late = []
    PlanStream.wanted = staticmethod(lambda device: True)
    join = PlanStream.join

    def run_and_join(stream: PlanStream) -> None:
        TapeGraphBackend.run_late()
        join(stream)

    PlanStream.join = run_and_join


def _planted(bug: str) -> bool:
    return Path(os.environ[VARIABLE]).read_text() == bug


def _plant_stale_drafts() -> None:
    """The drafts of a step are read before the draft's graph has run."""
    from sglang_dflash.host.worker.draft_runner import DraftRunner

    propose = DraftRunner.propose

    def propose_stale(runner: Any, block: Any, *rest: Any) -> Any:
        if not _planted(STALE_DRAFTS):
            return propose(runner, block, *rest)
        stale = runner._head.captured_ids[: len(block.ids), : block.width - 1].clone()
        return stale, propose(runner, block, *rest)[1]

    DraftRunner.propose = propose_stale


def _plant_rebound_ids() -> None:
    """The buffer of token ids is another tensor than at capture."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    load = DecodeCudaGraphRunner.load_batch

    def load_into_another(runner: Any, *args: Any, **kwargs: Any) -> None:
        slot = runner.buffer_registry.get_slot("input_ids")
        captured = slot.buffer
        if _planted(REBOUND_IDS):
            slot.buffer = runner.buffers.input_ids = captured.clone()
        load(runner, *args, **kwargs)
        slot.buffer = runner.buffers.input_ids = captured

    DecodeCudaGraphRunner.load_batch = load_into_another


def _plant_live_padding() -> None:
    """The slots of a padded batch's last rows stay those of the batch before."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import GraphSlot

    reset = GraphSlot.reset_padding

    def reset_others(slot: Any, raw_n: int, padded_n: int) -> None:
        if not (slot.name == "out_cache_loc" and _planted(LIVE_PADDING)):
            reset(slot, raw_n, padded_n)

    GraphSlot.reset_padding = reset_others


def _take_any_rows() -> None:
    """The policy tries plain steps and every size of graph, or every width, in turn, whatever pays."""
    from sglang_dflash.core.policy import Drafting
    from sglang_dflash.core.rows import RowPolicy

    def draft(policy: Any, names: Any) -> Any:
        policy._step, policy._names = policy._step + 1, list(names)
        for name in names:
            policy._request(name)
        count = policy._batch = len(names)
        if not policy._trims:
            choices = [*policy.widths, 1]
            width = choices[policy._step % len(choices)]
            return policy._of(width, list(range(count)) if width > 1 else [])
        options = [count, *range(count + policy._block_size, count * policy._block_size, policy._block_size)]
        options.append(count * policy._block_size)
        rows = options[policy._step % len(options)]
        width = 1 if rows == count else policy._block_size
        return Drafting(width, list(range(count)) if width > 1 else [], rows)

    RowPolicy.draft = draft


def _plant_errors_of_packed_rows() -> None:
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    from sglang_dflash.core.block import VerifyRows

    pad, spread = RaggedVerifyLayout.padded_to_bucket, VerifyRows.blocks

    def pad_another(layout: Any, **rest: Any) -> Any:
        padded = pad(layout, **rest)
        return padded._assemble_device(
            verify_lens=padded.verify_lens.sort(descending=True).values if _planted(OTHER_LENS) else padded.verify_lens,
            graph_num_tokens=padded.graph_num_tokens,
        )

    def spread_another(rows: Any, values: Any) -> Any:
        blocks = spread(rows, values)
        return blocks.roll(1, 0) if rows.chosen is not None and _planted(NEIGHBOURS) else blocks

    RaggedVerifyLayout.padded_to_bucket, VerifyRows.blocks = pad_another, spread_another


def _plant_another_width() -> None:
    from sglang_dflash.host.worker.width_graphs import Graphs

    give = Graphs.give

    def give_another(graphs: Any, runner: Any) -> None:
        before = runner.attn_backend
        give(graphs, runner)
        graphs.decode_cuda_graph_runner.attn_backend = before if _planted(OTHER_WIDTH) else graphs.attn_backend

    Graphs.give = give_another


def _plant_errors_of_trees() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_dflash import ops

    move, mask = MHATokenToKVPool.move_kv_cache, ops.attention_mask

    def move_nothing(pool: Any, slots: Any, sources: Any) -> None:
        move(pool, slots, slots if _planted(UNMOVED) else sources)

    def mask_of_chains(seen: Any, *rest: Any) -> Any:
        return mask(seen.new_ones(seen.shape).tril() if _planted(CHAIN_MASK) else seen, *rest)

    MHATokenToKVPool.move_kv_cache, ops.attention_mask = move_nothing, mask_of_chains

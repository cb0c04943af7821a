"""A plugin of SGLang for tests: our CPU platform offers SGLang's own graph runner, with tapes in the place of graphs.

The file that `GRAPH_TAPE_BUG` names holds the name of a bug for the moment, or nothing.
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
CHAIN_MASK = "a tree's row sees all rows before it"
UNMOVED_KV = "accepted rows stay where they were written"
ROW_POSITIONS = "a row's position follows from its slot"
OTHER_LENS = "rows are laid out for the lengths of the capture"
UNMASKED_DRAFTS = "drafts that were not verified are accepted"


def activate() -> None:
    """Entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash.host import fixed_trees, packed_step, widths
    from sglang_dflash.host.cpu.detect import ATTENTION_BACKEND

    widths.packs_rows = lambda device: os.environ.get(widths.WIDTH) == "adaptive"
    packed_step.BACKENDS = {ATTENTION_BACKEND}
    fixed_trees.BACKENDS = {ATTENTION_BACKEND}  # our static attention takes a mask as triton's does
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

    from sglang_dflash.host.cpu.detect import ATTENTION_BACKEND
    from sglang_dflash.host.cpu.platform import CpuPlatform

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
    _take_the_bodies_of_cuda()
    _rehearse_plan_stream()
    _plant_stale_drafts()
    _plant_rebound_ids()
    _plant_live_padding()
    _plant_errors_of_trees()
    _take_any_rows()
    _plant_errors_of_packed_rows()


def _capture(*, model_runner: Any) -> Any:
    """`capture_decode_graph`, which on a CPU captures only for torch.compile."""
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
    from sglang.srt.platforms import current_platform

    begin = time.perf_counter()
    runner = current_platform.get_graph_runner_cls()(model_runner)
    phase = "draft_decode" if model_runner.is_draft_worker else "target_verify"
    seconds = time.perf_counter() - begin
    return GraphCapture(runner=runner, memory_phase=phase, memory_usage_gb=0.0, capture_time=seconds)


def _take_the_bodies_of_cuda() -> None:
    """The ops over trees are those of CUDA, where the Triton argmax is its reference."""
    from sglang_dflash import ops
    from sglang_dflash.ops import fixed_trees

    choose = ops.choose_kernels

    def choose_kernels(*arguments: Any) -> ops.Kernels:
        kernels = choose(*arguments)

        def accept_tree_greedy(logits: Any, ids: Any, *rows: Any) -> Any:
            return fixed_trees.accept_tree(kernels.row_argmax(logits[: len(ids)]), ids, *rows)

        return replace(
            kernels,
            top_log_probs=fixed_trees.top_log_probs,
            accept_tree=fixed_trees.accept_tree,
            accept_tree_greedy=accept_tree_greedy,
        )

    ops.choose_kernels = choose_kernels


def _rehearse_plan_stream() -> None:
    """With SGLang's variable, the draft's graph runs as late as a plan stream lets it: after all work beside it."""
    from sglang.srt.environ import envs
    from tape_backend import TapeGraphBackend

    from sglang_dflash.host.plan_stream import PlanStream

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
    from sglang_dflash.host.draft_runner import DraftRunner

    propose = DraftRunner.propose

    def propose_stale(runner: Any, block: Any, *rest: Any) -> Any:
        stale = runner._head.captured_ids[: len(block.ids)].clone()
        fresh = propose(runner, block, *rest)
        return stale if _planted(STALE_DRAFTS) else fresh

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


def _plant_errors_of_trees() -> None:
    """One error in each of the three ops that make a tree's rows those of its paths."""
    from sglang_dflash import ops

    see, lay_out, place = ops.attention_mask, ops.lay_out_fixed_trees, ops.final_slots

    def see_all(seen: Any, *rest: Any) -> Any:
        return see(seen.new_ones(seen.shape).tril() if _planted(CHAIN_MASK) else seen, *rest)

    def lay_out_in_order(depths: Any, *rest: Any) -> Any:
        return lay_out(depths.new_ones(depths.shape).cumsum(1) - 1 if _planted(ROW_POSITIONS) else depths, *rest)

    def leave(*arguments: Any) -> Any:
        final = place(*arguments)
        return final._replace(sources=final.slots) if _planted(UNMOVED_KV) else final

    ops.attention_mask, ops.lay_out_fixed_trees, ops.final_slots = see_all, lay_out_in_order, leave


def _take_any_rows() -> None:
    """Packed steps try every number of rows in turn, whatever pays."""
    from sglang_dflash.core.row_budget import RowBudget

    def choose(budget: Any, batch: int) -> Any:
        budget._step += 1
        options = budget._options(batch)
        return options[budget._step % len(options)]

    RowBudget.choose = choose


def _plant_errors_of_packed_rows() -> None:
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    from sglang_dflash.core.block import VerifyPlan

    pad, compare = RaggedVerifyLayout.padded_to_bucket, VerifyPlan.compared

    def pad_another(layout: Any, **rest: Any) -> Any:
        padded = pad(layout, **rest)
        return padded._assemble_device(
            verify_lens=padded.verify_lens.sort(descending=True).values if _planted(OTHER_LENS) else padded.verify_lens,
            graph_num_tokens=padded.graph_num_tokens,
        )

    def compare_all(plan: Any) -> Any:
        return plan.chains() if _planted(UNMASKED_DRAFTS) else compare(plan)

    RaggedVerifyLayout.padded_to_bucket, VerifyPlan.compared = pad_another, compare_all

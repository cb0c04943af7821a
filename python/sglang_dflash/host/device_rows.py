"""Rows on CUDA: the host chooses how many a step verifies, by what it has read of earlier steps, and the device which.

So no step waits for the device, but for one with logprobs. Graphs of fixed numbers of rows verify them.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.utils.common import is_sm100_supported

from sglang_dflash import ops
from sglang_dflash.core.block import Block, VerifyPlan
from sglang_dflash.core.policy import Step
from sglang_dflash.host import simulated, widths
from sglang_dflash.host.device_readings import Readback
from sglang_dflash.host.draft_input import upload
from sglang_dflash.host.hooking import AROUND, hook
from sglang_dflash.host.protocols import ScheduleBatch
from sglang_dflash.host.rows import Proposed, StepRows, Timed
from sglang_dflash.host.widths import WIDTH

BACKENDS = {"fa3"} | ({"trtllm_mha"} if is_sm100_supported() else set())
"""Attention backends whose graphs verify packed rows; the kernels of trtllm_mha do so on SM100 alone."""


def check(cfg: Any, target: Any) -> None:
    """Refuses, if rows are to be trimmed, a server that cannot.

    Args:
        cfg: the host's view of the server arguments.
        target: the host's `ModelConfig`.

    Raises:
        ValueError: one sentence that names the value, the variable and what is needed.
    """
    if widths.trims_on_device(cfg.device):
        reason = _why_not(cfg, target)
        if reason is not None:
            raise ValueError(f"{WIDTH}=auto needs {reason}. Unset it.")


def _why_not(cfg: Any, target: Any) -> str | None:
    if cfg.tp_size > 1:
        return f"--tp-size 1, not {cfg.tp_size}, because ranks could choose different rows"
    if cfg.enable_deterministic_inference:
        return "a server without --enable-deterministic-inference, because the two have never been run together"
    if cfg.enable_lora or cfg.lora_paths:
        return "a server without --enable-lora, because SGLang packs no rows with adapters"
    if cfg.disable_cuda_graph or cfg.disable_decode_cuda_graph or cfg.cuda_graph_backend_decode == "disabled":
        return WITH_GRAPHS
    if cfg.disable_cuda_graph_padding:
        return "a server without --disable-cuda-graph-padding, because graphs have fixed numbers of rows"
    if mambaish_config(target) is not None:
        return "a target without recurrent state, because the two have never been run together"
    if target.is_hybrid_swa:
        return WITHOUT_WINDOWS
    if target.attention_arch == AttentionArch.MLA:
        return "a target without latent attention (MLA), because the two have never been run together"
    if target.is_multimodal:
        return "a target that reads text alone, because positions of images are laid out for whole blocks"
    if simulated.simulates():
        return f"{simulated.VARIABLE} unset, because it draws commit lengths for whole blocks"
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=0, because the packed rows follow from the drafts"
    return None


WITH_GRAPHS = "CUDA graphs of decode steps, because without them SGLang lays packed rows out on the host"
WITHOUT_WINDOWS = "a target without sliding windows, because the two have never been run together"


def check_backends(cfg: Any) -> None:
    """Refuses attention that takes no packed rows; to be called once SGLang has resolved the backends."""
    each = cfg.prefill_attention_backend, cfg.decode_attention_backend  # the first also verifies
    backends = {backend or cfg.attention_backend for backend in each} - {None}
    if widths.trims_on_device(cfg.device) and not backends <= BACKENDS:
        raise ValueError(
            f"--attention-backend is {', '.join(sorted(backends))}, and {WIDTH}=auto needs one whose graphs verify "
            f"packed rows; allowed: {', '.join(sorted(BACKENDS))}. Choose it, or unset {WIDTH}."
        )


class DeviceRows(StepRows):
    """Blocks of K rows are drafted for everybody; the likeliest of their rows are verified, as many as pay."""

    def __init__(self, *parts: Any) -> None:
        """To be constructed before graphs are captured. parts: see `StepRows`.

        Raises:
            SystemExit: the target has sliding windows, as its class says only when it is loaded.
        """
        super().__init__(*parts)
        if (self._target.sliding_window_size or 0) > 0:
            raise SystemExit(f"DFLASH cannot start: {WIDTH}=auto needs {WITHOUT_WINDOWS}. Unset it.")
        self._device = torch.device(self._target.device)
        self._sizes: list[int] = []  # rows of the target's graphs, rising
        self._slots = 0  # requests of the largest
        self._readback: Readback[list[str]] = Readback(self._device)
        self._chosen: tuple[torch.Tensor, torch.Tensor] | None = None  # survival and lens of this step's blocks

    def use_graphs(self) -> None:
        """To be called when the target's graphs are captured.

        Raises:
            SystemExit: none are.
        """
        runner = self._target.decode_cuda_graph_runner
        if runner is None:
            raise SystemExit(f"DFLASH cannot start: {WIDTH}=auto needs {WITH_GRAPHS}. Unset it.")
        self._sizes, self._slots = list(runner.capture_num_tokens), runner.max_bs

    def size_for(self, rows: int) -> int:
        """Rows of the smallest graph with room for so many; the rows themselves if none has."""
        place = bisect_left(self._sizes, rows)
        return self._sizes[place] if place < len(self._sizes) else rows

    def warm_up(self) -> None:
        """Compiles the host's kernels that lay packed rows out, for every number of requests."""
        runner, most = self._target.decode_cuda_graph_runner, self._target.max_running_requests
        powers = [1 << place for place in range(most.bit_length() + 1)]
        for count in {one for power in powers for one in (power, max(1, power - 1))}:
            _layout(torch.ones(count, dtype=torch.int32, device=self._device), count)
        for size in runner.capture_num_tokens:
            slots = min(size, runner.max_bs)
            for count in {1, 2, 16, slots}:
                lens = torch.ones(min(count, slots), dtype=torch.int32, device=self._device)
                _layout(lens, size).padded_to_bucket(padded_bs=slots)

    def propose(self, batch: ScheduleBatch) -> Proposed:
        for names, values in self._readback.arrived():
            survival, lens, commit_lens = np.split(values.numpy(), [-2, -1], axis=1)
            self._learn(Step(names, survival, lens[:, 0].astype(int), commit_lens[:, 0].astype(int)))
        self._begin(batch)
        self._chosen = None
        block = self.lay_out(batch, self._block_size)
        kv_plan = self.plan_kv(block, batch)
        if self._drafting.width > 1:
            plan = self._draft_block(block, kv_plan, batch)
        else:
            plan = VerifyPlan.of(block, block.ids, self._whole_rows(len(block.ids), 1))
        drafted = block.ids.numel() if self._drafting.width > 1 else 0
        self._clock.drafted(Timed(drafted, self._size(plan)))
        return Proposed(plan, kv_plan)

    def _draft_block(self, block: Block, kv_plan: Any, batch: ScheduleBatch) -> VerifyPlan:
        draft_ids, log_probs = self._propose_all(block, kv_plan, batch)
        ids = torch.cat((block.ids[:, :1], draft_ids), dim=1)
        offsets = upload(torch.from_numpy(self.policy.offsets(self._names, block.width - 1)), self._device)
        assert log_probs is not None
        survival = ops.survival(log_probs, offsets)
        requests, whole = ids.shape[0], ids.numel()
        size = self.size_for(self._drafting.rows)
        fits = requests <= self._slots and size < whole
        rows = ops.likeliest_rows(survival, size, size) if fits else self._whole_rows(requests, block.width)
        plan = VerifyPlan.of(block, ids, rows)
        self._chosen = survival, self._same_lens(requests, block.width) if plan.lens is None else plan.lens
        return plan

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

    def _size(self, plan: VerifyPlan) -> int:
        return len(plan.ids) if plan.rows is None else plan.rows.size

    def verify_fields(self, plan: VerifyPlan) -> dict[str, Any]:
        lens = self._same_lens(plan.batch, plan.width) if plan.lens is None else plan.lens
        cols = None if plan.rows is None else plan.rows.padded()
        return {"kv_loc_cols": cols, "ragged_verify_layout": _layout(lens, self._size(plan))}

    def learn(self, plan: VerifyPlan, commit_lens: torch.Tensor) -> None:
        if self._chosen is not None:
            survival, lens = self._chosen
            self._readback.send(self._names, torch.cat((survival, lens[:, None], commit_lens[:, None]), dim=1))
        super().learn(plan, commit_lens)


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
    return bool(original(algorithm)) or (algorithm.is_dflash() and widths.trims_on_device(get_device().device))

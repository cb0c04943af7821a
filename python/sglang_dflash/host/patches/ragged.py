"""Hooks where SGLang 0.5.23 assumes that all requests of a verification have equally many rows.

On CUDA SGLang lays such rows out itself (`RaggedVerifyLayout`); its kernels need an accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.worker.draft_input import upload
from sglang_dflash.host.worker.protocols import ForwardBatch


@dataclass
class RaggedVerifyInput(DFlashVerifyInput):
    """SGLang's verify input; `draft_token_num` is W, the most rows that a request may have.

    Fields:
        lens: [B] int32; rows of each request. None: each has W.
        seen: [B, W, W] bool; of trees on a CPU, the rows of its request that each row sees. None: those before it.
    """

    lens: torch.Tensor | None = None
    seen: torch.Tensor | None = None


def lens_of(batch: Any) -> torch.Tensor | None:
    """[B] int32: rows of each request of a `ForwardBatch` or `ScheduleBatch`; None if they have equally many."""
    return getattr(batch.spec_info, "lens", None)


@hook(
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.compute_spec_mrope_positions",
    AROUND,
    why="MRoPE positions are read as [requests, rows], equally many for each, and a batch with an image waits for them",
    until="SGLang reads the rows of each request and uploads without a wait",
)
def positions_of_sections(
    original: Any, forward_batch: ForwardBatch, runner: Any, batch: Any, seq_positions: torch.Tensor | None = None
) -> None:
    """The positions of time, height and width (MRoPE) of a verification of ours."""
    if not isinstance(batch.spec_info, RaggedVerifyInput) or seq_positions is not None:
        original(forward_batch, runner, batch, seq_positions)
        return
    spec_info, positions = batch.spec_info, batch.spec_info.positions
    deltas = [0 if one is None else int(one.mrope_position_delta) for one in batch.multimodal_inputs]
    if any(deltas):
        of_requests = upload(torch.tensor([*deltas, 0]), positions.device)
        if spec_info.kv_loc_cols is None:
            shifts = of_requests[:-1].repeat_interleave(len(positions) // len(deltas))
        else:  # places in whole blocks; -1 of a row that only fills a graph, so it takes the 0
            shifts = of_requests[spec_info.kv_loc_cols // spec_info.draft_token_num]
        positions = positions + shifts
    forward_batch.mrope_positions = positions.long()[None].repeat(3, 1)


@hook(
    "sglang.srt.lora.utils.get_batch_token_counts",
    AROUND,
    why="adapters are laid out for equally many rows of each request",
    until="SGLang reads the rows of each request",
)
def lora_token_counts(original: Any, forward_batch: ForwardBatch) -> tuple[int, int]:
    lens = lens_of(forward_batch) if forward_batch.forward_mode.is_target_verify() else None
    return original(forward_batch) if lens is None else (int(lens.sum()), int(lens.max()))


@hook(
    "sglang.srt.lora.utils.generate_sequence_lengths",
    AROUND,
    why="adapters are laid out for equally many rows of each request",
    until="SGLang reads the rows of each request",
)
def lora_lens(original: Any, forward_batch: ForwardBatch, device: Any = None) -> torch.Tensor:
    lens = lens_of(forward_batch) if forward_batch.forward_mode.is_target_verify() else None
    return original(forward_batch, device) if lens is None else lens

"""Hooks where SGLang 0.5.23 assumes that all requests of a verification have equally many rows."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dflash.host.hooking import AROUND, hook
from sglang_dflash.host.protocols import ForwardBatch
from sglang_dflash.ops import PlannedRows


def trees_of(batch: Any) -> PlannedRows | None:
    """The trees of a `ForwardBatch` or `ScheduleBatch`; None if its requests have equally many rows."""
    return getattr(batch.spec_info, "trees", None)


@hook(
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.compute_spec_mrope_positions",
    AROUND,
    why="MRoPE positions are read as [requests, rows], equally many for each",
    until="SGLang reads the rows of each request",
)
def positions_of_sections(
    original: Any, forward_batch: ForwardBatch, runner: Any, batch: Any, seq_positions: torch.Tensor | None = None
) -> None:
    """The positions of time, height and width (MRoPE). The host reads [B, W] positions."""
    trees = trees_of(batch)
    if trees is None or seq_positions is not None:
        original(forward_batch, runner, batch, seq_positions)
        return
    inputs = batch.multimodal_inputs
    deltas = [0 if one is None else int(one.mrope_position_delta) for one in inputs]
    positions = batch.spec_info.positions + torch.tensor(deltas)[trees.requests]
    forward_batch.mrope_positions = positions[None].repeat(3, 1)


@hook(
    "sglang.srt.lora.utils.get_batch_token_counts",
    AROUND,
    why="adapters are laid out for equally many rows of each request",
    until="SGLang reads the rows of each request",
)
def lora_token_counts(original: Any, forward_batch: ForwardBatch) -> tuple[int, int]:
    trees = trees_of(forward_batch) if forward_batch.forward_mode.is_target_verify() else None
    return original(forward_batch) if trees is None else (sum(trees.lens), max(trees.lens))


@hook(
    "sglang.srt.lora.utils.generate_sequence_lengths",
    AROUND,
    why="adapters are laid out for equally many rows of each request",
    until="SGLang reads the rows of each request",
)
def lora_lens(original: Any, forward_batch: ForwardBatch, device: Any = None) -> torch.Tensor:
    trees = trees_of(forward_batch) if forward_batch.forward_mode.is_target_verify() else None
    return original(forward_batch, device) if trees is None else trees.counts

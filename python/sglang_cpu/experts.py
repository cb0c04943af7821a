"""Runs the experts of SGLang's mixtures on a plain CPU with the native op `experts`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sglang_cpu import ops
from sglang_cpu.hooking import AROUND, hook

MAX_ROWS = 128  # rows of an expert, on average; with more, as in long prompts, torch's BLAS is faster


@hook(
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
    AROUND,
    why="a loop over experts in Python; and Nemotron-H's experts, which are not gated and need their scaling "
    "factor, are not served",
    until="SGLang has grouped products for a plain CPU",
)
def run_experts(original: Any, layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """Computes `moe_forward_native` with our op. SGLang's is a loop over experts, whose products are small and whose
    routing is read back for each layer.

    Experts with biases or a bounded activation (gpt-oss) and long prompts keep SGLang's loop. It has no body for
    experts that are not gated, and does not know their scaling factor (Nemotron-H): those are always ours.

    Args:
        layer: SGLang's `FusedMoE`.
        x: [T, H].
        topk_output: SGLang's `StandardTopKOutput`.
    """
    weights, ids, _ = topk_output
    up, down = layer.w13_weight, layer.w2_weight
    kernels = ops.choose_kernels(x.dtype)
    if not config.is_gated and config.activation == "relu2":
        return kernels.experts(x, up, down, ids, weights.float() * (config.routed_scaling_factor or 1.0), "relu2")
    special = config.gemm1_alpha is not None or config.apply_router_weight_on_input or not config.is_gated
    special = special or getattr(layer, "w13_weight_bias", None) is not None
    special = special or getattr(layer, "w2_weight_bias", None) is not None
    few = ids.numel() <= MAX_ROWS * len(up)
    taken = x.dtype == up.dtype == down.dtype and kernels.native
    if special or config.activation not in ("silu", "gelu") or not (few and taken):
        loop = original if len(up) == layer.num_experts else functools.partial(_of_this_rank, original)
        out: torch.Tensor = loop(layer, x, topk_output, config)
        return out
    return kernels.experts(x, up, down, ids, weights, config.activation)


def _of_this_rank(original: Any, layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """SGLang's loop over the experts of this rank. An id of -1, an expert of another rank, would end it, and it counts
    an id once that a row has twice. So each row and expert become a row of their own; their sum is in float32."""
    ids = topk_output.topk_ids
    rows, places = (ids >= 0).nonzero(as_tuple=True)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if len(rows):
        pairs = topk_output._replace(
            topk_weights=topk_output.topk_weights[rows, places][:, None], topk_ids=ids[rows, places][:, None]
        )
        total.index_add_(0, rows, original(layer, x[rows], pairs, config).float())
    return total.to(x.dtype)

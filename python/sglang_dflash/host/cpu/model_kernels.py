"""Replaces kernels of accelerators that the host calls on a plain CPU for single models (Gemma 4, MiniMax-M2,
Nemotron-H)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.plugins.hook_registry import HookType
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from sglang_dflash import ops


def softcap_logits(logits: torch.Tensor, cap: float | None, output: torch.Tensor | None = None) -> torch.Tensor:
    """Gemma's bounded logits, `cap * tanh(logits / cap)`, in place or into `output` in float32. cap: None leaves them
    as they are."""
    output = logits if output is None else output.copy_(logits)
    return output if cap is None else output.div_(cap).tanh_().mul_(cap)


def norm_all_heads(original: Any, norm: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MiniMax-M2's RMS norm over all query heads together, and over all key heads.

    Args:
        norm: the host's `MiniMaxM2QKRMSNorm`.
        q, k: [T, heads * D].
    """
    from sglang.srt.models.minimax_m2 import attn_tp_all_reduce

    rows, weights = (q.contiguous(), k.contiguous()), (norm._q_norm.weight, norm._k_norm.weight)
    if norm._world_size == 1:
        bodies = ops.TORCH_ROWS if get_proxy_mode() is not None else ops.choose_rows("cpu", q.dtype, weights[0].dtype)
        q, k = (bodies.rms_norm(x, weight, norm._eps) for x, weight in zip(rows, weights, strict=True))
        return q, k
    squares = attn_tp_all_reduce(torch.stack([x.float().square().sum(-1) for x in rows]))  # [2, T]
    sizes = [x.shape[1] * norm._world_size for x in rows]
    q, k = (
        (x.float() * (square / size + norm._eps).rsqrt()[:, None] * weight.float()).to(x.dtype)
        for x, square, size, weight in zip(rows, squares, sizes, weights, strict=True)
    )
    return q, k


def route_and_run_experts(moe: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Nemotron-H's experts, routed and shared; torch has the host's product for the router on CUDA alone.

    Args:
        moe: the host's `NemotronHMoE`.
        hidden: [T, H].
    """
    chosen = moe.topk(hidden, hidden.float() @ moe.gate.weight.float().t())
    shared = None if moe.shared_experts is None else moe.shared_experts(hidden)
    inner = moe._apply_fc1_latent_proj(hidden) if moe.use_latent_moe else hidden
    return moe.experts(inner, chosen), shared


def squared_relu_experts(original: Any, layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """The host's torch experts are gated, and do not know a routed scaling factor. Nemotron-H's are not gated: the
    sum of `weight * down(relu(up x)^2)` over a row's experts, in the order of their numbers.

    Args:
        layer: the host's `FusedMoE`.
        x: [T, H].
        topk_output: the host's `StandardTopKOutput`.
    """
    if config.is_gated or config.activation != "relu2":
        out: torch.Tensor = original(layer, x, topk_output, config)
        return out
    weights, ids, _ = topk_output
    weights = weights.float() * (config.routed_scaling_factor or 1.0)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        inner = F.relu(F.linear(x[rows], layer.w13_weight[expert])).square()
        total.index_add_(0, rows, F.linear(inner, layer.w2_weight[expert]) * weights[rows, places, None])
    return total.to(x.dtype)


HOOKS: dict[str, tuple[Any, HookType]] = {
    "sglang.kernels.ops.activation.softcap._softcap_logits": (softcap_logits, HookType.REPLACE),
    "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm._forward_naive": (norm_all_heads, HookType.AROUND),
    "sglang.srt.models.nemotron_h.NemotronHMoE._forward_core_normal": (route_and_run_experts, HookType.REPLACE),
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": (squared_relu_experts, HookType.AROUND),
}
"""Hook target -> (our function, how it is applied)."""

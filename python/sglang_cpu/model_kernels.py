"""Replaces kernels of accelerators that SGLang calls on a plain CPU for single models (Gemma 4, MiniMax-M2,
Nemotron-H)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from sglang_cpu import ops
from sglang_cpu.hooking import AROUND, REPLACE, hook


@hook(
    "sglang.kernels.ops.activation.softcap._softcap_logits",
    REPLACE,
    why="Triton only: Gemma's bounded logits",
    until="SGLang has a torch body",
)
def softcap_logits(logits: torch.Tensor, cap: float | None, output: torch.Tensor | None = None) -> torch.Tensor:
    """Gemma's bounded logits, `cap * tanh(logits / cap)`, in place or into `output` in float32. cap: None leaves them
    as they are."""
    output = logits if output is None else output.copy_(logits)
    return output if cap is None else output.div_(cap).tanh_().mul_(cap)


@hook(
    "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm._forward_naive",
    AROUND,
    why="Triton only: MiniMax-M2's norm of all heads together",
    until="SGLang has a torch body",
)
def norm_all_heads(original: Any, norm: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MiniMax-M2's RMS norm over all query heads together, and over all key heads.

    Args:
        norm: SGLang's `MiniMaxM2QKRMSNorm`.
        q, k: [T, heads * D].
    """
    from sglang.srt.models.minimax_m2 import attn_tp_all_reduce

    rows, weights = (q.contiguous(), k.contiguous()), (norm._q_norm.weight, norm._k_norm.weight)
    if norm._world_size == 1:
        traced = get_proxy_mode() is not None
        kernels = ops.REFERENCE_KERNELS if traced else ops.choose_kernels(q.dtype, weights[0].dtype)
        q, k = (kernels.rms_norm(x, weight, norm._eps) for x, weight in zip(rows, weights, strict=True))
        return q, k
    squares = attn_tp_all_reduce(torch.stack([x.float().square().sum(-1) for x in rows]))  # [2, T]
    sizes = [x.shape[1] * norm._world_size for x in rows]
    q, k = (
        (x.float() * (square / size + norm._eps).rsqrt()[:, None] * weight.float()).to(x.dtype)
        for x, square, size, weight in zip(rows, squares, sizes, weights, strict=True)
    )
    return q, k


@hook(
    "sglang.srt.models.nemotron_h.NemotronHMoE._forward_core_normal",
    REPLACE,
    why="torch has the router's product with a float32 result on CUDA alone",
    until="SGLang asks its platform here",
)
def route_and_run_experts(moe: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Nemotron-H's experts, routed and shared; torch has SGLang's product for the router on CUDA alone.

    Args:
        moe: SGLang's `NemotronHMoE`.
        hidden: [T, H].
    """
    chosen = moe.topk(hidden, hidden.float() @ moe.gate.weight.float().t())
    shared = None if moe.shared_experts is None else moe.shared_experts(hidden)
    inner = moe._apply_fc1_latent_proj(hidden) if moe.use_latent_moe else hidden
    return moe.experts(inner, chosen), shared

"""Replaces Triton kernels that SGLang launches on a plain CPU for gated layers (Qwen3.5, Qwen3-Next)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from sglang_cpu import ops
from sglang_cpu.hooking import AROUND, REPLACE, hook


@hook(
    "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
    REPLACE,
    why="Triton only",
    until="SGLang has a torch body",
)
def split_projections(
    qkvz: torch.Tensor, ba: torch.Tensor, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the two projections of a gated delta layer; SGLang copies them.

    Args:
        qkvz: [T, 2 * Hk * K + 2 * H * V]; all queries, keys, values and gates.
        ba: [T, 2 * H].

    Returns:
        qkv [T, 2 * Hk * K + H * V], gates [T, H, V], b [T, H], a [T, H].
    """
    values = num_v_heads * v_dim
    qkv, z = qkvz.split([qkvz.shape[-1] - values, values], dim=-1)
    b, a = ba.split([num_v_heads, num_v_heads], dim=-1)
    return qkv, z.unflatten(-1, (num_v_heads, v_dim)), b, a


@hook(
    "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat",
    REPLACE,
    why="Triton only",
    until="SGLang has a torch body",
)
def split_grouped_projections(
    qkvz: torch.Tensor, ba: torch.Tensor, num_k_heads: int, num_v_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`split_projections` where each key head's query, key, values and gates stand together, as in Qwen3-Next."""
    group = num_v_heads // num_k_heads
    q, k, v, z = qkvz.unflatten(-1, (num_k_heads, -1)).split([k_dim, k_dim, group * v_dim, group * v_dim], dim=-1)
    b, a = ba.unflatten(-1, (num_k_heads, -1)).split([group, group], dim=-1)
    qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
    return qkv, z.reshape(-1, num_v_heads, v_dim), b.flatten(1), a.flatten(1)


@hook(
    "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
    REPLACE,
    why="Triton only",
    until="SGLang has a torch body",
)
def add_shared_expert(
    hidden: torch.Tensor, gate_weight: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor
) -> None:
    """Adds the shared expert's output to the routed ones', in place: `routed += sigmoid(hidden @ gate) * shared`.

    Args:
        hidden, shared, routed: [T, H].
        gate_weight: [H].
    """
    routed += (hidden @ gate_weight[:, None]).sigmoid() * shared


@hook(
    "sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul",
    REPLACE,
    why="Triton only",
    until="SGLang has a torch body",
)
def gate_attention(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """attn_output [T, H * D] times the sigmoid of the gate, [T, H * D] or [T, H, D]. Callers take what is returned, so
    it is never in place: a captured forward has no such op."""
    assert not quant, "quantised outputs are an accelerator's"
    return attn_output * gate.flatten(1).sigmoid()


@hook(
    "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
    AROUND,
    why="Triton only",
    until="SGLang has a torch body",
)
@hook(
    "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
    AROUND,
    why="Triton only",
    until="SGLang has a torch body",
)
def gated_norm(original: Any, norm: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """Serves the forms that Qwen's models and Kimi-Linear use: no groups, SiLU or a sigmoid behind the norm."""
    group, behind = getattr(norm, "group_size", None), getattr(norm, "norm_before_gate", True)
    if z is None or group is not None or not behind or norm.activation not in ("swish", "silu", "sigmoid"):
        raise NotImplementedError(
            f"On the CPU, gated norms are served without groups and with SiLU or a sigmoid behind the norm, not with "
            f"group_size {group}, norm_before_gate {behind}, activation {norm.activation}."
        )
    silu = norm.activation != "sigmoid"
    z = z.reshape(x.shape)  # Kimi's rows have a dimension of 1 before them
    if get_proxy_mode() is not None:  # in a captured forward, inductor fuses it
        return ops.REFERENCE_KERNELS.gated_rms_norm(x, z, norm.weight, norm.eps, silu)
    kernels = ops.choose_kernels(x.dtype, norm.weight.dtype)
    return kernels.gated_rms_norm(x, z, norm.weight, norm.eps, silu)


class _DeviceModule:
    """torch's module of the default accelerator, for a build of torch with CUDA on a machine without a GPU."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def current_device(self) -> str:
        return "cpu"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@hook(
    "sglang.srt.model_loader.loader._initialize_model",
    AROUND,
    why="Qwen3-Next asks torch for a CUDA device while it is made",
    until="SGLang asks its platform",
)
def initialize_on_cpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Models of Qwen3-Next put a norm's weight on torch's default accelerator, whatever the server's device is."""
    device_module = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        module = device_module(device)
        return _DeviceModule(module) if device is None else module

    torch.get_device_module = get_device_module  # type: ignore[assignment]
    try:
        return original(*args, **kwargs)
    finally:
        torch.get_device_module = device_module

"""The specification of the experts of a mixture, in plain torch: each expert's products for all of its rows together.

The shapes are those of SGLang's `FusedMoE`: `moe_forward_native` in layers/moe/fused_moe_native.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(raw: torch.Tensor) -> torch.Tensor:
        gate, other = raw.chunk(2, dim=-1)
        return activation(gate) * other

    return apply


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _gated(F.silu),
    "gelu": _gated(lambda gate: F.gelu(gate, approximate="tanh")),
    "relu2": lambda raw: F.relu(raw).square(),
}
"""Name -> from [N, U] to [N, I], in float32. The gated ones multiply by the second half of the columns: U = 2 I."""


def experts(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, activation: str
) -> torch.Tensor:
    """The sum of `weights[t, k] * down activation(up x[t])` over the K experts of each row t, in the order of k.

    The results of both products are rounded to x's dtype; the activation and the sum are in float32. An id of -1 adds
    nothing: with expert parallelism another rank has that expert.

    Args:
        x: [T, H].
        up: [E, U, H], of x's dtype.
        down: [E, H, I], of x's dtype.
        ids: [T, K] int32 or int64, in -1 .. E - 1.
        weights: [T, K].
        activation: a name of ACTIVATIONS.

    Returns: [T, H], of x's dtype.
    """
    outs = x.new_zeros(*ids.shape, x.shape[1])  # [T, K, H]
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        inner = ACTIVATIONS[activation](F.linear(x[rows], up[expert]).float())
        outs[rows, places] = F.linear(inner, down[expert].float()).to(x.dtype)
    factors = torch.where(ids == -1, 0.0, weights.float())
    return (outs.float() * factors[..., None]).sum(1).to(x.dtype)

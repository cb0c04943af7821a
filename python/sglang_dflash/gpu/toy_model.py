"""A decoder stack of a published shape with dummy weights: its output is noise, its cost is realistic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_dflash.gpu import toy_kernels as kernels


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a target and its draft, which differ only in depth. `taps`: how many target layers the draft reads."""

    layers: int
    draft_layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    vocab: int
    taps: int

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads


QWEN3_8B = Shape(36, 5, 4096, 32, 8, 128, 12_288, 151_936, 5)
TINY = Shape(1, 1, 32, 2, 1, 16, 48, 301, 1)


def dummy(*shape: int, device: str, scale: float = 0.02) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(std=scale)


class Stack:
    """Decoder layers and a final norm, without embedding and head."""

    def __init__(self, shape: Shape, layers: int, device: str, positions: int) -> None:
        self.shape, self.layers = shape, layers
        widths = (shape.groups + 2) * shape.kv_heads * shape.dim, shape.heads * shape.dim
        ones = torch.ones(shape.hidden, device=device, dtype=torch.bfloat16)
        self.norm = ones
        self.head_norm = torch.ones(shape.dim, device=device, dtype=torch.bfloat16)
        self.weights = [
            (
                dummy(widths[0], shape.hidden, device=device),
                dummy(shape.hidden, widths[1], device=device),
                dummy(2 * shape.intermediate, shape.hidden, device=device),
                dummy(shape.hidden, shape.intermediate, device=device),
            )
            for _ in range(layers)
        ]
        frequencies = 1e6 ** (-torch.arange(0, shape.dim, 2, device=device) / shape.dim)
        angles = torch.outer(torch.arange(positions, device=device), frequencies)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float().contiguous()

    def weight_bytes(self) -> int:
        return sum(w.numel() * 2 for layer in self.weights for w in layer)

    def cache(self, batch: int, capacity: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values per layer, [B, Hkv, capacity, D] each: dense, because paging moves the same bytes."""
        shape = (batch, self.shape.kv_heads, capacity, self.shape.dim)
        device = str(self.norm.device)
        return [(dummy(*shape, device=device), dummy(*shape, device=device)) for _ in range(self.layers)]

    def forward(
        self,
        x: torch.Tensor,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
        prefix: int,
        tapped: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the rows of all requests after a prefix of one length.

        Every row sees the whole prefix and all rows. A verify forward's causal mask among 16 rows hides almost nothing
        of a thousand keys, so the cost is right for target and draft.

        Args:
            x: [B * K, H].
            tapped: [B * K, taps * H]; receives the hidden states after the tapped layers.
        """
        residual = torch.zeros_like(x)
        for layer, (qkv, out, gate_up, down) in enumerate(self.weights):
            h = kernels.add_rms_norm(x, residual, self.norm)
            k, v = cache[layer]
            q = kernels.qk_norm_rope(
                F.linear(h, qkv), self.head_norm, self.head_norm, self.cos_sin, k, v, prefix, self.shape.groups
            )
            attended = F.scaled_dot_product_attention(q, k, v)  # [B, Hkv, groups * K, D]
            rows = attended.unflatten(2, (self.shape.groups, -1)).permute(0, 3, 1, 2, 4).reshape(len(x), -1)
            h = kernels.add_rms_norm(F.linear(rows, out), residual, self.norm)
            x = F.linear(kernels.silu_mul(F.linear(h, gate_up)), down)
            if tapped is not None and layer < self.shape.taps:
                width = self.shape.hidden
                torch.add(x, residual, out=tapped[:, layer * width : (layer + 1) * width])
        return kernels.add_rms_norm(x, residual, self.norm)

"""The specification of DFlash2's convolution over the rows of a block, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def grouped_conv(x: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, block_size: int) -> torch.Tensor:
    """A depthwise convolution whose kernels depend on their rows, and which does not reach over a block's first row.

    out[n, c] = sum over taps t of (base[t, c] + delta[n, t, c // C]) * x[n - t, c], where row n - t is in n's block.

    Args:
        x: [N, H]; the blocks, one after the other, from row 0 on.
        delta: [N, taps, G]; G groups of C = H / G channels each.
        base: [taps, H].
        block_size: rows of each block, 1 or more.

    Returns:
        [N, H], in x's dtype.
    """
    taps, groups = delta.shape[-2:]
    group = (groups, x.shape[1] // groups)
    rows = x.view(-1, *group)  # [N, G, C]
    kernels = base.view(-1, *group) + delta[..., None]  # [N, taps, G, C]
    out = kernels[:, 0] * rows
    place = torch.arange(len(x), device=x.device) % block_size  # in its block
    for tap in range(1, min(taps, block_size)):
        before = F.pad(rows[:-tap], (0, 0, 0, 0, tap, 0))
        out = out + kernels[:, tap] * torch.where((place >= tap)[:, None, None], before, 0)
    return out.view_as(x)

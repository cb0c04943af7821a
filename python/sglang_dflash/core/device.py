"""What this machine computes on."""

from __future__ import annotations


def on_cuda() -> bool:
    """Whether torch has a CUDA device: SGLang then serves from it without being told."""
    import torch

    return torch.cuda.is_available()

"""The optimizers and the learning-rate schedule that both trainings share."""

import math

import torch
from torch import nn

_WARM_UP = 0.04


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 4 % of the steps, then a cosine down to a hundredth of `peak`."""
    warm = max(1, round(steps * _WARM_UP))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def make_optimizers(model: nn.Module, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the projection matrices, AdamW for embeddings and norms: fewer steps than AdamW alone."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def take_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Clip the gradients at norm 1, step every optimizer at `rate`, clear the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

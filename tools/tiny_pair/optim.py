"""The optimizers and the learning-rate schedule of the target's training."""

import math
from collections import defaultdict

import torch
from torch import nn

_WARM_UP = 0.04
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 4 % of the steps, then a cosine down to 1/100 of `peak`."""
    warm = max(1, round(steps * _WARM_UP))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    """Nearly orthogonalizes `update`, [N, A, B] with A <= B, by Newton-Schulz iterations."""
    a, b, c = _NEWTON_SCHULZ
    update = update / update.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = update @ update.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        update = torch.baddbmm(update, gram, update, beta=a)
    return update


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with float32 iterations on stacks of matrices of one shape.

    torch's Muon iterates in bfloat16, which takes seconds per step on CPUs without bfloat16 units.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves every matrix along its orthogonalized Nesterov momentum, scaled to AdamW's step sizes."""
        assert closure is None
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    stacks[min(weight.shape), max(weight.shape)].append(weight)
            for weights in stacks.values():
                self._step_stack(weights, group)

    def _step_stack(self, weights: list[nn.Parameter], group: dict[str, float]) -> None:
        directions = []
        for weight in weights:
            assert weight.grad is not None
            state = self.state[weight]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(weight)
            state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
            direction = weight.grad.lerp(state["momentum"], group["momentum"])
            directions.append(direction.mT if weight.shape[0] > weight.shape[1] else direction)
        updates = _orthogonal(torch.stack(directions))
        for weight, update in zip(weights, updates, strict=True):
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            scale = group["lr"] * 0.2 * math.sqrt(max(weight.shape))
            weight.add_(update.mT if weight.shape[0] > weight.shape[1] else update, alpha=-scale)


def make_optimizers(model: nn.Module, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the projection matrices, AdamW for embeddings and norms; needs fewer steps than AdamW alone."""
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=peak, weight_decay=0.05),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def take_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Clips the gradients at norm 1, steps every optimizer at `rate`, clears the gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

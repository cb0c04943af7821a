"""Products and activations for a plain CPU in which a row's result does not depend on other rows, bit for bit.

Torch's CPU kernels do not ensure this. A product of one row takes another path than a product of eight rows. An
activation uses other functions for the elements after the last full vector, of the tensor or of a thread's share.
RMSNorm, softmax, log_softmax, sorting and sums over a row do go row by row.

Products are the native `linear`, whose rows are independent by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sglang_cpu.ops import native


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.mm`: [M, K] x [K, N] -> [M, N]. Dtypes that no served model has keep torch's kernel."""
    if not native.serves(a.device, a.dtype, b.dtype):
        return torch.mm(a, b, out=a.new_empty(len(a), b.shape[1]))  # the kernel `mm.out`, which `BODIES` leaves alone
    weight = b.t()  # [N, K], dense rows wherever a layer's weight comes from `F.linear`
    weight = weight if weight.stride(1) == 1 or weight.shape[1] == 1 else weight.contiguous()
    out: torch.Tensor = torch.ops.sglang_cpu.linear(a, weight, None)
    return out


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """`torch.addmm`; the product is rounded before the bias is added."""
    product = mm(a, b)
    return torch.add(product if alpha == 1 else product * alpha, bias, alpha=beta)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`torch.sigmoid`. Like all activations here, it uses only basic arithmetic and functions whose kernels treat every
    element alike: exp, tanh and erf."""
    return (1 / (1 + torch.exp(-_wide(x)))).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """`F.silu`."""
    wide = _wide(x)
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """`F.gelu`."""
    wide = _wide(x)
    if approximate == "tanh":
        bent = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    else:
        bent = torch.erf(wide * math.sqrt(0.5))
    return (0.5 * wide * (1 + bent)).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


BODIES: dict[str, Callable[..., torch.Tensor]] = {
    "mm": mm,
    "addmm": addmm,
    "sigmoid": sigmoid,
    "silu": silu,
    "gelu": gelu,
}


def install_batch_invariant_kernels() -> torch.library.Library:
    """Replaces torch's CPU kernels by `BODIES` in this process, as long as the returned library lives."""
    library = torch.library.Library("aten", "IMPL")
    for name, body in BODIES.items():
        library.impl(name, body, "CPU")
    return library

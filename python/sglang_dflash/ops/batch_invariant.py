"""Products and activations for a plain CPU in which a row's result does not depend on other rows, bit for bit.

Torch's CPU kernels do not ensure this. A product of one row takes another path than a product of eight rows. An
activation uses other functions for the elements after the last full vector, of the tensor or of a thread's share.
RMSNorm, softmax, log_softmax, sorting and sums over a row do go row by row.

Products use the native `linear`, whose rows are independent by construction. Without native ops they use torch's
product with a fixed number of rows, and `place_matters` tests whether that is enough on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

from sglang_dflash.ops import native

TILE_ROWS = 8  # rows per product: fewer make it no faster, more make a decode step of one request slower
COMPARED = 1 << 20  # elements that `place_matters` compares, at least: 16-bit rounding hides most differences


@cache
def tile_rows(dtype: torch.dtype) -> int:
    """Rows per product; 1 where the CPU has no instructions for a 16-bit type, so that nothing is padded.

    Torch then computes the rows one by one. For bfloat16 with AVX-512 its rounding depends on the row's position
    instead, and each row costs its full time, so one row at a time is no slower.
    """
    if dtype == torch.bfloat16:
        emulated = not torch.cpu.get_capabilities().get("avx512_bf16", True)  # other architectures lack this key
        return TILE_ROWS if torch.ops.mkldnn._is_mkldnn_bf16_supported() and not emulated else 1
    if dtype == torch.float16:
        return TILE_ROWS if torch.ops.mkldnn._is_mkldnn_fp16_supported() else 1
    return TILE_ROWS


def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.mm`: [M, K] x [K, N] -> [M, N]."""
    if native.serves(a.device, a.dtype, b.dtype):
        return _native_mm(a, b)
    return _tiled_mm(a, b)


def _native_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    weight = b.t()  # [N, K], dense rows wherever a layer's weight comes from `F.linear`
    weight = weight if weight.stride(1) == 1 or weight.shape[1] == 1 else weight.contiguous()
    out: torch.Tensor = torch.ops.sglang_dflash.linear(a, weight, None)
    return out


def _tiled_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.mm` in products of `tile_rows` rows. All of them read and write the same memory, because MKL's rounding
    also depends on alignment."""
    tile = tile_rows(a.dtype)
    rows, product = a.new_zeros(tile, a.shape[1]), a.new_empty(tile, b.shape[1])
    out = a.new_empty(len(a), b.shape[1])
    for source, result in zip(torch.split(a, tile), torch.split(out, tile), strict=True):
        rows[: len(source)] = source  # other rows of the last tile keep old values, which are not used
        torch.mm(rows, b, out=product)  # calls the kernel `mm.out`, which `BODIES` does not replace
        result.copy_(product[: len(source)])
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
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, body in BODIES.items():
        library.impl(name, body, "CPU")  # type: ignore[no-untyped-call]
    return library


def place_matters(weight: torch.Tensor) -> bool:
    """Whether a row's product with `weight` ([N, K]) depends on its place in a tile.

    `mm` without native ops needs a BLAS where it does not, and no standard promises that. With MKL the place matters if
    N is small and K is odd, because rows are then aligned differently; with AVX-512 it matters if N is small.
    """
    tile, weight = tile_rows(weight.dtype), weight.detach()
    if tile == 1:
        return False
    generator = torch.Generator().manual_seed(0)
    for _ in range(1 + COMPARED // (tile * tile * len(weight))):
        rows = torch.randn(tile, weight.shape[1], generator=generator).to(weight.dtype)
        straight = mm(rows, weight.t())
        rolled = (mm(rows.roll(shift, 0), weight.t()).roll(-shift, 0) for shift in range(1, tile))
        if not all(torch.equal(other, straight) for other in rolled):
            return True
    return False

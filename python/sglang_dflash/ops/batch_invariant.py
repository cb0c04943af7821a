"""Products and activations that give a row the same bits whatever stands beside it, for a plain CPU.

Torch's CPU kernels do not: a product of one row takes another path than one of eight, and an activation computes the
elements behind the last full vector, of the tensor or of a thread's share, with other functions. RMSNorm, softmax,
log_softmax, sorting and sums over a row go row by row already. Products are those of the native `linear`, whose rows
depend on nothing else by construction; without it, torch's of a fixed number of rows, and `place_matters` asks the
machine whether that is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

from sglang_dflash.ops import native

TILE_ROWS = 8  # rows per product: fewer leave a product no faster, more cost a decode of one request more
ASKED = 1 << 20  # elements that `place_matters` compares, at least: a 16-bit result hides most of what differs


@cache
def tile_rows(dtype: torch.dtype) -> int:
    """Rows per product. Without instructions for a 16-bit type torch computes its rows one by one, or, of bfloat16 with
    AVX-512, rounds them by their place, at the price of each: there a tile is one row, and nothing is padded."""
    if dtype == torch.bfloat16:
        emulated = not torch.cpu.get_capabilities().get("avx512_bf16", True)  # another architecture's have no such name
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
    """`torch.mm` in products of `tile_rows` rows, each of which reads and writes the same memory: MKL rounds by the
    alignment, too."""
    tile = tile_rows(a.dtype)
    rows, product = a.new_zeros(tile, a.shape[1]), a.new_empty(tile, b.shape[1])
    out = a.new_empty(len(a), b.shape[1])
    for source, result in zip(torch.split(a, tile), torch.split(out, tile), strict=True):
        rows[: len(source)] = source  # behind the last ones stand those of the tile before, which is all the same
        torch.mm(rows, b, out=product)  # another kernel of torch's dispatcher than `mm`, which we replace
        result.copy_(product[: len(source)])
    return out


def addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """`torch.addmm`; the product is rounded before the bias is added."""
    product = mm(a, b)
    return torch.add(product if alpha == 1 else product * alpha, bias, alpha=beta)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """`torch.sigmoid`. Built, like all here, of exact operations and functions whose kernels treat every element
    alike: exp, tanh and erf."""
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
    """Makes `BODIES` the CPU kernels of this process, for as long as the returned library lives."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, body in BODIES.items():
        library.impl(name, body, "CPU")  # type: ignore[no-untyped-call]
    return library


def place_matters(weight: torch.Tensor) -> bool:
    """Whether a row's product with `weight` ([N, K]) depends on where in a tile it stands: what `mm` without native ops
    needs of the machine's BLAS, and no standard promises. MKL's does for a few columns and an odd K, where rows are
    aligned differently, with AVX-512 for a few columns at all."""
    tile, weight = tile_rows(weight.dtype), weight.detach()
    if tile == 1:
        return False
    generator = torch.Generator().manual_seed(0)
    for _ in range(1 + ASKED // (tile * tile * len(weight))):
        rows = torch.randn(tile, weight.shape[1], generator=generator).to(weight.dtype)
        straight = mm(rows, weight.t())
        rolled = (mm(rows.roll(shift, 0), weight.t()).roll(-shift, 0) for shift in range(1, tile))
        if not all(torch.equal(other, straight) for other in rolled):
            return True
    return False

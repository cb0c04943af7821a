"""Quantises weights as published checkpoints do, beside the dense weights that they then mean; independent of ours."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 16  # weights that share a scale; a block of FP8 is as wide and as high
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that AutoAWQ puts at each place of a word
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Parts = dict[str, torch.Tensor]


def in_words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, columns] unsigned numbers -> [rows, words] int32; place i of a word holds the column `order[i]`."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, columns = numbers.shape
    wide = torch.zeros(rows, -(-columns // per_word) * per_word, dtype=torch.int64)
    wide[:, :columns] = numbers
    words = sum(wide[:, column::per_word] << (bits * place) for place, column in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def rounded(weight: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[out, in] -> numbers [out, in], zeros [out, groups], scales [out, groups] in float16."""
    grouped, top = weight.unflatten(1, (-1, GROUP)), 2**bits - 1
    low, high = grouped.amin(2), grouped.amax(2)
    if symmetric:
        high = grouped.abs().amax(2)
        low = -high
    scales = ((high - low) / top).half()
    middle = torch.full_like(scales, 2 ** (bits - 1))
    zeros = middle if symmetric else (-low / scales.float()).round().clamp(1, top)
    numbers = (grouped / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
    return numbers.clamp(0, top).flatten(1).long(), zeros.long(), scales


def meant(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The dense weight [out, in], number by number."""
    columns = torch.arange(numbers.shape[1]) // GROUP
    return (numbers - zeros[:, columns]).float() * scales.float()[:, columns]


def awq(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    numbers, zeros, scales = rounded(weight, 4, symmetric=False)
    parts = {
        "qweight": in_words(numbers.t(), 4, AWQ_ORDER),
        "qzeros": in_words(zeros.t(), 4, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return parts, meant(numbers, zeros, scales)


def gptq(weight: torch.Tensor, bits: int = 4, act_order: bool = True, v2: bool = False) -> tuple[Parts, torch.Tensor]:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    if not act_order:
        order = torch.arange(weight.shape[1])
    numbers, zeros, scales = rounded(weight[:, order], bits, symmetric=not act_order)
    dense, groups = torch.empty_like(weight), torch.empty_like(order)
    dense[:, order], groups[order] = meant(numbers, zeros, scales), torch.arange(weight.shape[1]) // GROUP
    original = torch.empty_like(numbers)
    original[:, order] = numbers
    parts = {
        "qweight": in_words(original, bits).t().contiguous(),
        "qzeros": in_words((zeros if v2 else zeros - 1).t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": groups.int(),
    }
    return parts, dense


def compressed(weight: torch.Tensor, bits: int = 4, symmetric: bool = True) -> tuple[Parts, torch.Tensor]:
    numbers, zeros, scales = rounded(weight, bits, symmetric)
    parts = {
        "weight_packed": in_words(numbers, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = in_words(zeros.t(), bits).t().contiguous()
    return parts, meant(numbers, zeros, scales)


def fp8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    rows, columns = (-(-size // GROUP) for size in weight.shape)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(4)) + 0.5
    wide = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[: weight.shape[0], : weight.shape[1]]
    packed = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": packed, "weight_scale_inv": scales}, packed.float() * wide


def mxfp4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Experts [E, in, out] -> blocks and scales; and the dense weight, of the same shape."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = blocks.abs().amax(3).log2().floor() - 2
    scaled = blocks / exponents.exp2().unsqueeze(3)
    codes = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
    values = FP4[codes] * scaled.sign() * exponents.exp2().unsqueeze(3)
    codes = codes + 8 * (scaled < 0)
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    parts = {"_blocks": packed, "_scales": (exponents + 127).to(torch.uint8)}
    return parts, values.flatten(2).transpose(1, 2).contiguous()


WAYS: dict[str, tuple[Callable[[torch.Tensor], tuple[Parts, torch.Tensor]], dict[str, Any]]] = {
    "awq": (awq, {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"bits": 4, "group_size": GROUP, "desc_act": True, "sym": False, "lm_head": True}),
    "compressed-tensors": (
        compressed,
        {
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": GROUP,
                        "symmetric": True,
                    },
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "fp8": (fp8, {"activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}),
    "mxfp4": (mxfp4, {"modules_to_not_convert": []}),
}
"""Method -> how it packs a weight, and what a checkpoint says of it."""


def pack(folder: Path, plain: Path, method: str) -> None:
    """Quantises the layers' projections of the checkpoint at `folder`, with GPTQ its head, too. What they then mean is
    written to `plain`."""
    way, described = WAYS[method]
    tensors = load_file(folder / "model.safetensors")
    packed: Parts = {}
    dense: Parts = {}
    for name, tensor in tensors.items():
        experts = method == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        linear = method != "mxfp4" and name.endswith("_proj.weight") and ".layers." in name and "vision" not in name
        linear |= method == "gptq" and name == "lm_head.weight"
        if not experts and not (linear and tensor.shape[1] % GROUP == 0 and tensor.shape[0] % 8 == 0):
            packed[name] = dense[name] = tensor
            continue
        parts, dense[name] = way(tensor.float())
        stem = name.removesuffix("weight")
        packed |= {f"{stem}{part}": values for part, values in parts.items()}
    assert len(packed) > len(tensors), f"{method} packed nothing of {sorted(tensors)}"
    shutil.copytree(folder, plain)
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (settings.get("text_config") or settings)["quantization_config"] = {"quant_method": method, **described}
    (folder / "config.json").write_text(json.dumps(settings, indent=2))

"""Which tensors of a quantised checkpoint make up one weight, by its `quantization_config`, and the dense weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang_cpu.ops.packed_weights import dense_awq, dense_fp8, dense_gptq, dense_grouped, dense_mxfp4

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
METHODS = ("fp8", "awq", "gptq", "compressed-tensors", "mxfp4 (gpt-oss)")
"""Methods whose weights are made dense, as an error names them."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a method packs a weight.

    Fields:
        method: its name.
        suffixes: end of a tensor's name -> the end of the weight's name, and which argument of `dense` the tensor is.
        needed: the arguments of every weight.
        dropped: ends of names of tensors that no weight needs.
        dense: makes the weight, of the arguments and `dtype`.
        fp8: whether a tensor in FP8 is the argument "weight" under its own name.
    """

    method: str
    suffixes: Mapping[str, tuple[str, str]]
    needed: frozenset[str]
    dropped: tuple[str, ...]
    dense: Callable[..., torch.Tensor]
    fp8: bool = False

    def place(self, name: str, tensor: torch.Tensor) -> tuple[str, str] | None:
        """The weight that a tensor belongs to, and as what; None if it is a weight of its own."""
        if self.fp8 and tensor.dtype in FP8:
            return name, "weight"
        for suffix, (end, part) in self.suffixes.items():
            if name.endswith(suffix):
                return name.removesuffix(suffix) + end, part
        return None


def read_packing(described: Mapping[str, Any], architectures: Iterable[str]) -> Packing:
    """Reads a checkpoint's `quantization_config`.

    Raises:
        ValueError: weights of that kind cannot be made dense; the sentence's end, after "quantised by".
    """
    method = str(described.get("quant_method") or described.get("quant_algo")).lower()
    if method == "fp8":
        experts = described.get("routed_experts_quant_method")
        if experts:
            raise ValueError(
                f"fp8 with routed_experts_quant_method {experts!r}; on the CPU, fp8 is served without that key"
            )
        return _fp8(method, described.get("weight_block_size"))
    if method == "awq":
        return _awq(described)
    if method == "gptq":
        return _gptq(described)
    if method == "compressed-tensors":
        return _compressed(described)
    if method == "mxfp4" and "GptOssForCausalLM" in architectures:
        suffixes = {"_blocks": ("", "blocks"), "_scales": ("", "scales")}
        return Packing(method, suffixes, frozenset(("blocks", "scales")), (), dense_mxfp4)
    raise ValueError(f"{method}, which needs an accelerator; on the CPU, {', '.join(METHODS)} are served")


def dense_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    packing: Packing,
    make: Callable[[Callable[[], torch.Tensor]], Any],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Any]]:
    """A checkpoint's tensors with each packed weight made dense as soon as all of its parts have come.

    Args:
        weights: names and tensors, in any order.
        make: called with a function that makes a weight; what it returns is yielded.
        dtype: of the dense weights.

    Raises:
        ValueError: a weight lacks a part.
    """
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        if name.endswith(packing.dropped):
            continue
        place = packing.place(name, tensor)
        if place is None:
            yield name, tensor
            continue
        weight, part = place
        parts = held.setdefault(weight, {})
        parts[part] = tensor
        if packing.needed <= parts.keys():
            yield weight, make(partial(packing.dense, **held.pop(weight), dtype=dtype))
    if held:
        name, parts = next(iter(held.items()))
        lacks = ", ".join(sorted(packing.needed - parts.keys()))
        raise ValueError(f"The checkpoint's {packing.method} weight {name} lacks a part: {lacks}.")


def _fp8(method: str, block: Any) -> Packing:
    # A model's inputs stay as they are, so scales of inputs are of no use.
    suffixes = {"_scale_inv": ("", "scales"), ".weight_scale": (".weight", "scales")}
    dropped = (".input_scale", ".activation_scale")
    dense = partial(dense_fp8, block=None if block is None else tuple(block))
    return Packing(method, suffixes, frozenset(("weight", "scales")), dropped, dense, fp8=True)


def _awq(described: Mapping[str, Any]) -> Packing:
    bits, version = described.get("bits", described.get("w_bit")), str(described.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or described.get("zero_point") is False:
        raise ValueError(
            f"awq with bits {bits}, version {version!r} and zero_point {described.get('zero_point')}; on the CPU, 4 "
            "bits, 'gemm' and true are served"
        )
    parts = ("qweight", "qzeros", "scales")
    return Packing("awq", {f".{part}": (".weight", part) for part in parts}, frozenset(parts), (), dense_awq)


def _gptq(described: Mapping[str, Any]) -> Packing:
    bits, layout = described.get("bits"), described.get("checkpoint_format") or "gptq"
    changed = [rule for rule in described.get("dynamic") or {} if not rule.startswith("-")]
    if bits not in (2, 4, 8) or layout not in ("gptq", "gptq_v2") or changed:
        raise ValueError(
            f"gptq with bits {bits}, checkpoint_format {layout!r} and {len(changed)} dynamic rules; on the CPU, 2, 4 "
            "or 8 bits, 'gptq' or 'gptq_v2' and rules that leave layers out are served"
        )
    parts = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales"}
    dropped: tuple[str, ...] = (".g_idx",)
    if described.get("desc_act", True):  # if nothing is said, the order of the inputs may differ
        parts, dropped = {**parts, ".g_idx": "groups"}, ()
    suffixes = {suffix: (".weight", part) for suffix, part in parts.items()}
    dense = partial(dense_gptq, bits=bits, zero_offset=int(layout == "gptq"))
    return Packing("gptq", suffixes, frozenset(parts.values()), dropped, dense)


def _compressed(described: Mapping[str, Any]) -> Packing:
    method, layout = "compressed-tensors", described.get("format")
    groups = list((described.get("config_groups") or {}).values())
    ways = [group.get("weights") or {} for group in groups]
    keys = ("num_bits", "type", "strategy", "symmetric", "actorder")
    kinds = {tuple(way.get(key) for key in keys) for way in ways}
    layouts = {layout, *(group.get("format") or layout for group in groups)}
    if len(kinds) == 1 and len(layouts) == 1 and not described.get("transform_config"):
        ((bits, kind, strategy, symmetric, order),) = kinds
        blocks = {tuple(way.get("block_structure") or ()) for way in ways}
        if layout in ("float-quantized", "naive-quantized") and (bits, kind) == (8, "float") and len(blocks) == 1:
            block = blocks.pop() or None
            if strategy in ("tensor", "channel") or (strategy == "block" and block is not None):
                return _fp8(method, block if strategy == "block" else None)
        if layout == "pack-quantized" and kind == "int" and bits in (2, 4, 8) and strategy in ("group", "channel"):
            parts = {".weight_packed": "packed", ".weight_scale": "scales", ".weight_shape": "shape"}
            if symmetric is False:
                parts[".weight_zero_point"] = "zeros"
            if order in ("group", "dynamic", True):
                parts[".weight_g_idx"] = "groups"
            suffixes = {suffix: (".weight", part) for suffix, part in parts.items()}
            dropped = (".input_scale", *({".weight_g_idx", ".weight_zero_point"} - suffixes.keys()))
            return Packing(method, suffixes, frozenset(parts.values()), dropped, partial(dense_grouped, bits=bits))
    raise ValueError(
        f"{method} with the format {layout!r} and {len(kinds)} kinds of weights; on the CPU, one kind without "
        "transforms is served: 'pack-quantized' integers of 2, 4 or 8 bits, or 'float-quantized' FP8"
    )

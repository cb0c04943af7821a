"""Packed weights: the dense weight of every method, and how a checkpoint's tensors are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from packed_checkpoints import GROUP, WAYS, Parts, awq, compressed, fp8, gptq, in_words, mxfp4
from sglang_cpu.ops.packed_weights import dense_fp8, dense_mxfp4, unpack_words
from sglang_cpu.packings import dense_weights, read_packing

ROWS, COLUMNS = 32, 80
GPT_OSS = ("GptOssForCausalLM",)


def described(method: str, **changed: Any) -> dict[str, Any]:
    return {"quant_method": method, **WAYS[method][1], **changed}


def weight(*shape: int) -> torch.Tensor:
    """With groups of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[-1])


def made(parts: Parts, config: dict[str, Any], dtype: torch.dtype, name: str = "a.") -> tuple[str, torch.Tensor]:
    """The one weight that these tensors make."""
    named = [(f"{name}{part}", values) for part, values in parts.items()]
    packing = read_packing(config, GPT_OSS)
    ((got, dense),) = dense_weights(named, packing, lambda make: make(), dtype)
    return got, dense


CASES: dict[str, tuple[Callable[[torch.Tensor], tuple[Parts, torch.Tensor]], dict[str, Any]]] = {
    "awq": (awq, described("awq")),
    "gptq, order of activations": (gptq, described("gptq")),
    "gptq": (lambda w: gptq(w, act_order=False), described("gptq", desc_act=False)),
    "gptq, 8 bits": (lambda w: gptq(w, bits=8), described("gptq", bits=8)),
    "gptq, 2 bits": (lambda w: gptq(w, bits=2), described("gptq", bits=2)),
    "gptq v2": (lambda w: gptq(w, v2=True), described("gptq", checkpoint_format="gptq_v2")),
    "compressed": (compressed, described("compressed-tensors")),
    "fp8": (fp8, described("fp8")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_weight_that_the_tensors_mean(case: str, dtype: torch.dtype) -> None:
    """Fails where a number, a zero or a scale of another row, column or group is taken, or where it is rounded before
    the product."""
    way, config = CASES[case]
    parts, expected = way(weight(ROWS, COLUMNS))
    name, dense = made(parts, config, dtype)
    assert name == "a.weight" and dense.dtype == dtype and torch.equal(dense, expected.to(dtype))


def test_asymmetric_compressed_tensors() -> None:
    """Fails where a zero is read from another row or group."""
    ways = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": False}
    config = described("compressed-tensors", config_groups={"group_0": {"weights": ways}})
    parts, expected = compressed(weight(ROWS, COLUMNS), symmetric=False)
    assert torch.equal(made(parts, config, torch.float32)[1], expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_are_those_of_compressed_tensors(bits: int) -> None:
    """Fails where our packer and our unpacker share a mistake about the order in a word, or about the sign bit."""
    numbers = torch.randint(0, 2**bits, (5, 19), generator=torch.Generator().manual_seed(1))
    signed = (numbers - 2 ** (bits - 1)).to(torch.int8)
    words = in_words(numbers, bits)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(unpack_words(words, bits)[:, :19].long(), numbers)
    assert torch.equal(unpack_from_int32(words, bits, signed.shape), signed)


def test_awqs_order_by_hand() -> None:
    """Fails where the columns of a word come in another order than AutoAWQ's: 0, 2, 4, 6, 1, 3, 5, 7."""
    parts = {
        "qweight": torch.tensor([[0x75316420]], dtype=torch.int32),  # each column holds its own number
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8),
    }
    assert made(parts, described("awq"), torch.float32)[1].tolist() == [[float(column)] for column in range(8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_is_that_of_transformers(dtype: torch.dtype) -> None:
    """Fails where the halves of a byte are exchanged, a scale is of another block, or the weight is not transposed."""
    parts, expected = mxfp4(weight(3, 64, 10).transpose(1, 2).reshape(3, 64, 10))
    name, dense = made(parts, described("mxfp4"), dtype, "mlp.experts.gate_up_proj")
    assert name == "mlp.experts.gate_up_proj" and torch.equal(dense, expected.to(dtype))
    theirs = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.bfloat16)
    assert torch.equal(dense.bfloat16(), theirs)
    every = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    for scale in (0, 1, 126, 127, 130, 250):
        scales = torch.full((1, 16, 1), scale, dtype=torch.uint8)
        assert torch.equal(dense_mxfp4(every, scales, torch.bfloat16), convert_moe_packed_tensors(every, scales))


def test_fp8_with_other_scales() -> None:
    """Fails where a scale of the whole, of a row or of experts' blocks is not spread over its weights."""
    packed = weight(3, 24, COLUMNS).clamp(-400, 400).to(torch.float8_e4m3fn)
    rows = torch.rand(24, 1) + 1
    assert torch.equal(dense_fp8(packed[0], rows, torch.float32, None), packed[0].float() * rows)
    assert torch.equal(dense_fp8(packed[0], torch.tensor([3.0]), torch.float32, None), packed[0].float() * 3)
    scales = torch.rand(3, 2, 5) + 1
    wide = scales.repeat_interleave(16, 1)[:, :24].repeat_interleave(16, 2)
    named = {"gate_up_proj": packed, "gate_up_proj_scale_inv": scales}
    assert torch.equal(made(named, described("fp8"), torch.float32)[1], packed.float() * wide)
    channel = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": channel}},
    }
    named = {"weight": packed[0], "weight_scale": rows, "input_scale": torch.ones(1)}
    assert torch.equal(made(named, config, torch.float32)[1], packed[0].float() * rows)


def test_fp8_with_too_many_scales() -> None:
    """Fails where shards that were padded to whole blocks are read with their neighbours' scales (MiMo's fused
    projections)."""
    with pytest.raises(ValueError, match=r"40 x 32 in blocks of \(16, 16\) have \[4, 2\] scales"):
        dense_fp8(torch.zeros(40, 32).to(torch.float8_e4m3fn), torch.ones(4, 2), torch.float32, (16, 16))


def test_fp8_with_a_flat_row_of_scales() -> None:
    """Fails where scales without a second dimension are taken for those of columns, which fits square weights."""
    with pytest.raises(ValueError, match=r"shape \[32, 32\] have scales of shape \[32\]"):
        dense_fp8(torch.zeros(32, 32).to(torch.float8_e4m3fn), torch.ones(32), torch.float32, None)


def test_parts_in_any_order_and_plain_tensors_between() -> None:
    """Fails where a part of one weight goes to another, a plain tensor is lost, or a weight is kept until the end."""
    first, second = awq(weight(ROWS, COLUMNS)), awq(weight(16, 32))
    tensors = {f"a.{part}": values for part, values in first[0].items()}
    tensors |= {f"b.{part}": values for part, values in second[0].items()}
    tensors |= {"norm.weight": torch.ones(3), "a.bias": torch.ones(4)}
    order = ["b.scales", "a.qzeros", "norm.weight", "a.qweight", "b.qweight", "a.scales", "a.bias", "b.qzeros"]
    packing = read_packing(described("awq"), ())
    got = list(dense_weights(((name, tensors[name]) for name in order), packing, lambda make: make(), torch.float32))
    assert [name for name, _ in got] == ["norm.weight", "a.weight", "a.bias", "b.weight"]
    assert torch.equal(dict(got)["a.weight"], first[1]) and torch.equal(dict(got)["b.weight"], second[1])


def test_a_missing_part_is_named() -> None:
    """Fails where a model is served with weights that were never filled."""
    tensors = [("a.qweight", torch.zeros(8, 1, dtype=torch.int32)), ("a.scales", torch.ones(1, 8))]
    with pytest.raises(ValueError, match=r"awq weight a\.weight lacks a part: qzeros"):
        list(dense_weights(tensors, read_packing(described("awq"), ()), lambda make: make(), torch.float32))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (described("awq", version="gemv"), "'gemv'"),
        (described("awq", bits=8), "bits 8"),
        (described("awq", zero_point=False), "zero_point False"),
        (described("gptq", bits=3), "bits 3"),
        (described("gptq", checkpoint_format="marlin"), "'marlin'"),
        (described("gptq", dynamic={"+:model.layers.1": {"bits": 8}, "-:lm_head": {}}), "1 dynamic rules"),
        (described("compressed-tensors", format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (described("compressed-tensors", format="int-quantized"), "'int-quantized'"),
        (described("compressed-tensors", transform_config={"a": 1}), "transforms"),
        (described("fp8", routed_experts_quant_method="mxfp4"), "routed_experts_quant_method 'mxfp4'"),
        ({"quant_algo": "NVFP4"}, "nvfp4, which needs an accelerator"),
        ({}, "none, which needs an accelerator"),
    ],
    ids=str,
)
def test_other_layouts_are_refused(config: dict[str, Any], says: str) -> None:
    """Fails where a layout that we do not know is read as one that we do."""
    with pytest.raises(ValueError) as error:
        read_packing(config, GPT_OSS)
    assert says in str(error.value)


def test_mxfp4_is_gpt_oss_alone() -> None:
    """Fails where other models' MXFP4, whose layout is another, is read."""
    with pytest.raises(ValueError, match="mxfp4"):
        read_packing(described("mxfp4"), ("DeepseekV4ForCausalLM",))


def test_groups_are_as_wide_as_they_are_tested() -> None:
    """Fails where the cases above have one group only, so that a mix-up of groups cannot show."""
    assert COLUMNS // GROUP > 2

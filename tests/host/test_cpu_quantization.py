"""FP8 weights on a plain CPU: what a layer multiplies by after loading; other methods are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import MergedColumnParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from stand_ins import configured, one_rank

from sglang_dflash.host.cpu.platform import CpuPlatform
from sglang_dflash.host.cpu.quantization import DenseFp8Config, DenseFp8MoEMethod, check

BLOCK, SIZES, INPUT = 16, [32, 48], 40
FP8 = torch.float8_e4m3fn


def quantised(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] in FP8, and its scales: one, or one per block."""
    if kind != "block":
        scale = weight.abs().max() / 448
        return (weight / scale).to(FP8), scale
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scales = torch.rand(rows, columns) + 0.5
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / wide).to(FP8), scales


def dequantised(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if scales.dim():
        scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: packed.shape[0], : packed.shape[1]]
    return packed.float() * scales


def config_of(kind: str) -> DenseFp8Config:
    described = {"quant_method": "fp8", "activation_scheme": "static" if kind == "static" else "dynamic"}
    if kind == "block":
        described["weight_block_size"] = [BLOCK, BLOCK]
    return DenseFp8Config() if kind == "online" else DenseFp8Config.from_config(described)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["block", "tensor", "static"])
def test_a_merged_layer_from_a_checkpoint(kind: str, dtype: torch.dtype) -> None:
    """Fails where a part of a merged layer gets another part's scale, or a block its neighbour's."""
    torch.manual_seed(0)
    parts = [quantised(scale * torch.randn(size, INPUT), kind) for scale, size in zip((1, 7), SIZES, strict=True)]
    with configured(), one_rank():
        layer = MergedColumnParallelLinear(
            INPUT, SIZES, bias=False, params_dtype=dtype, quant_config=config_of(kind), prefix="mlp.gate_up_proj"
        )
        scales = layer.weight_scale_inv if kind == "block" else layer.weight_scale
        for shard, (packed, scale) in enumerate(parts):
            layer.weight.weight_loader(layer.weight, packed, shard)
            scales.weight_loader(scales, scale, shard)
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(3, INPUT, dtype=dtype)
        got, _ = layer(x)
    weight = torch.cat([dequantised(*part) for part in parts]).to(dtype)
    assert torch.equal(layer.weight, weight) and type(layer.quant_method) is UnquantizedLinearMethod
    torch.testing.assert_close(got, F.linear(x, weight))


def test_plain_weights_are_rounded() -> None:
    """Fails where `--quantization fp8` leaves a plain checkpoint as it is, or changes it by more than FP8's error."""
    torch.manual_seed(0)
    with configured(), one_rank():
        layer = MergedColumnParallelLinear(INPUT, SIZES, bias=False, quant_config=config_of("online"), prefix="x")
        weight = torch.randn(sum(SIZES), INPUT)
        layer.weight.data.copy_(weight)
        layer.quant_method.process_weights_after_loading(layer)
    error = (layer.weight - weight).abs()
    assert error.max() > 0 and (error <= weight.abs() / 16 + weight.abs().max() / 448).all()


def test_skipped_layers_stay_plain() -> None:
    """Fails where a layer that the checkpoint keeps in full precision is read as FP8."""
    ignored = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")]
    config = DenseFp8Config(is_checkpoint_fp8_serialized=True, ignored_layers=ignored)
    with configured(), one_rank():
        layer = MergedColumnParallelLinear(
            INPUT, SIZES, bias=False, quant_config=config, prefix="model.layers.0.mlp.gate_up_proj"
        )
    assert layer.weight.dtype == torch.get_default_dtype()


@pytest.mark.parametrize("kind", ["block", "tensor", "online"])
def test_experts(kind: str) -> None:
    """Fails where an expert gets another expert's scale, or the up projection the gate's."""
    torch.manual_seed(0)
    experts, hidden, inner = 3, 32, 16
    layer = torch.nn.Module()
    layer.moe_tp_size, layer.moe_runner_config = 1, SimpleNamespace(is_gated=True)
    with configured():
        method = DenseFp8MoEMethod(config_of(kind))
        method.create_weights(layer, experts, hidden, inner, torch.float32)
        expected = {}
        for name, shapes in (("w13_weight", [(inner, hidden)] * 2), ("w2_weight", [(hidden, inner)])):
            whole = []
            for expert in range(experts):
                parts = [(expert + 1) * (part + 2) * torch.randn(shape) for part, shape in enumerate(shapes)]
                packed = [(part, torch.ones(())) if kind == "online" else quantised(part, kind) for part in parts]
                getattr(layer, name).data[expert] = torch.cat([values for values, _ in packed])
                if kind == "block":
                    getattr(layer, f"{name}_scale_inv").data[expert] = torch.cat([scales for _, scales in packed])
                elif kind == "tensor":
                    getattr(layer, f"{name}_scale").data[expert] = torch.stack([s for _, s in packed]).squeeze()
                whole.append(torch.cat([dequantised(*part) for part in packed]))
            expected[name] = torch.stack(whole)
        method.process_weights_after_loading(layer)
    for name, weight in expected.items():
        tolerance = weight.abs().amax((1, 2), keepdim=True) / 16 if kind == "online" else 0
        assert ((getattr(layer, name) - weight).abs() <= tolerance).all()


@pytest.mark.parametrize("method", ["awq", "gptq", "mxfp4", "compressed-tensors", "modelopt_fp4", "w8a8_int8", "gguf"])
def test_other_methods_are_refused(method: str) -> None:
    """Fails where weights are read that only an accelerator's kernels can multiply by."""
    with pytest.raises(ValueError, match=f"^the target is quantised by {method}, which needs .* fp8 is served.$"):
        check(method, "the target")
    assert CpuPlatform().get_quantization_config(method) is None
    check("fp8", "the target")
    check(None, "the target")

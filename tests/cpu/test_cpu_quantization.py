"""Quantised weights on a plain CPU: what the host sees, `--quantization fp8`, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition
from sglang.srt.layers.linear import MergedColumnParallelLinear
from sglang.test.cpu_test_utils import unpack_and_dequant_gptq
from stand_ins import configured, one_rank

from packed_checkpoints import awq, gptq
from sglang_cpu import quantization
from sglang_cpu.platform import CpuPlatform
from sglang_cpu.quantization import RoundedMoEMethod, RoundedToFp8, check, packing_of

SIZES, INPUT = [32, 48], 40
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def model_config(described: Any, flag: str | None = None, architecture: str = "Qwen3ForCausalLM") -> Any:
    hf_config = SimpleNamespace(architectures=[architecture], quantization_config=described)
    common = {"dtype": torch.float32, "model_path": "somewhere", "is_draft_model": False}
    return SimpleNamespace(hf_config=hf_config, quantization=flag, **common)


def unseen(config: Any) -> str:
    config.quantization = "the host's"
    return "asked"


def test_our_checkpoints_are_those_that_the_host_reads() -> None:
    """Fails where the tests' AWQ or GPTQ weights, against which ours are compared, are laid out in another way than
    those that SGLang's own torch code unpacks."""
    torch.manual_seed(0)
    weight = torch.randn(32, 48)
    parts, dense = awq(weight)
    theirs = awq_dequantize_decomposition(parts["qweight"], parts["scales"].float(), parts["qzeros"])
    assert torch.equal(theirs.t(), dense)
    parts, dense = gptq(weight, act_order=False)
    assert torch.equal(unpack_and_dequant_gptq(parts["qweight"], parts["qzeros"], parts["scales"].float()), dense)


@pytest.mark.parametrize("flag", [None, "unquant", "awq"])
def test_the_host_sees_a_plain_model(flag: str | None) -> None:
    """Fails where the host makes quantised layers, for which it has no kernel, or where a second reading of the same
    config has forgotten how the weights are packed."""
    config = model_config(AWQ, flag)
    for _ in range(2):
        quantization._verify_quantization(unseen, config)
        assert config.quantization is None and config.hf_config.quantization_config is None
        assert packing_of(config.hf_config).method == "awq"


@pytest.mark.parametrize(
    ("described", "flag"),
    [(None, None), (None, "fp8"), ({"quant_method": "quark"}, None), ({**AWQ, "bits": 3}, None)],
    ids=str,
)
def test_the_rest_is_the_hosts(described: Any, flag: str | None) -> None:
    """Fails where weights that we cannot make dense pass for plain ones, or a plain checkpoint for a packed one."""
    config = model_config(described, flag)
    quantization._verify_quantization(unseen, config)
    assert config.quantization == "the host's" and config.hf_config.quantization_config == described


@pytest.mark.parametrize(
    "described", [AWQ, {**AWQ, "bits": 3}, {"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"}], ids=str
)
def test_a_flag_against_the_targets_checkpoint_is_ours_to_refuse(described: Any) -> None:
    """Fails where the host ends with a traceback before our sentence, or where nothing refuses the pair."""
    config = model_config(described, "gguf")
    quantization._verify_quantization(unseen, config)
    assert config.quantization == "gguf" and config.hf_config.quantization_config == described
    with pytest.raises(ValueError, match=r"^the target is .*\.$"):
        check(described, ("Qwen3ForCausalLM",), config.quantization, "auto", "the target")
    draft = model_config(described, "gguf")
    draft.is_draft_model = True
    quantization._verify_quantization(unseen, draft)
    assert draft.quantization == "the host's"


def test_updates_are_refused_and_loads_are_dense() -> None:
    """Fails where an update could read quantised tensors as plain ones, or a plain model cannot be updated."""
    described = {"quant_method": "fp8"}
    loaded = [("a.weight", torch.ones(2, 3).to(torch.float8_e4m3fn)), ("a.weight_scale", torch.tensor(2.0))]
    for config, count in ((model_config(described), 1), (model_config(None), 2)):
        model = torch.nn.Module()
        got = list(quantization._load_dense(lambda *_: iter(loaded), None, config, model))
        assert len(got) == count and hasattr(model, "_derived_weight_cache_error") == (count == 1)
        if count == 1:
            assert got[0][0] == "a.weight" and torch.equal(got[0][1], torch.full((2, 3), 2.0))


def test_plain_weights_are_rounded() -> None:
    """Fails where `--quantization fp8` leaves a plain checkpoint as it is, or changes it by more than FP8's error."""
    torch.manual_seed(0)
    with configured(), one_rank():
        layer = MergedColumnParallelLinear(INPUT, SIZES, bias=False, quant_config=RoundedToFp8(), prefix="x")
        weight = torch.randn(sum(SIZES), INPUT)
        layer.weight.data.copy_(weight)
        layer.quant_method.process_weights_after_loading(layer)
    error = (layer.weight - weight).abs()
    assert error.max() > 0 and (error <= weight.abs() / 16 + weight.abs().max() / 448).all()


def test_plain_experts_are_rounded() -> None:
    """Fails where an expert stays as it is, or is rounded with another expert's scale."""
    torch.manual_seed(0)
    experts, hidden, inner = 3, 32, 16
    layer = torch.nn.Module()
    layer.moe_tp_size, layer.moe_runner_config = 1, SimpleNamespace(is_gated=True)
    sizes = torch.tensor([1.0, 30.0, 900.0]).view(3, 1, 1)
    with configured():
        method = RoundedMoEMethod()
        method.create_weights(layer, experts, hidden, inner, torch.float32)
        before = {name: sizes * torch.randn(getattr(layer, name).shape) for name in ("w13_weight", "w2_weight")}
        for name, weight in before.items():
            getattr(layer, name).data.copy_(weight)
        method.process_weights_after_loading(layer)
    for name, weight in before.items():
        error = (getattr(layer, name) - weight).abs()
        assert (error.amax((1, 2)) > 0).all()
        assert (error <= weight.abs() / 16 + weight.abs().amax((1, 2), keepdim=True) / 448).all()


@pytest.mark.parametrize("method", ["modelopt_fp4", "w8a8_int8", "gguf", "bitsandbytes", "quark", "mxfp4"])
def test_other_methods_are_refused(method: str) -> None:
    """Fails where weights are read that only an accelerator's kernels can multiply by."""
    with pytest.raises(ValueError, match=f"^the target is quantised by {method}, which needs .* are served.$"):
        check({"quant_method": method}, ("Qwen3ForCausalLM",), None, "auto", "the target")
    assert CpuPlatform().get_quantization_config(method) is None


@pytest.mark.parametrize(("described", "flag"), [(None, "awq"), (AWQ, "fp8"), (None, "gguf")], ids=str)
def test_a_flag_that_the_checkpoint_does_not_allow(described: Any, flag: str) -> None:
    """Fails where a plain checkpoint is read as a packed one, or a packed one is packed anew."""
    with pytest.raises(ValueError, match=f"^the target is to be quantised by {flag}; .* allows: (fp8|awq).$"):
        check(described, (), flag, "auto", "the target")


def test_what_is_served_passes() -> None:
    """Fails where a served method is refused."""
    check({"quant_method": "mxfp4"}, ("GptOssForCausalLM",), None, "auto", "the target")
    check(AWQ, (), "unquant", "safetensors", "the draft")
    check(AWQ, (), "AWQ", "dummy", "the draft")
    check(None, (), "fp8", "auto", "the target")
    check(None, (), None, "runai_streamer", "the target")


def test_loaders_that_hand_over_whole_files_are_refused() -> None:
    """Fails where packed tensors reach plain layers."""
    with pytest.raises(ValueError, match=r"^the target is quantised by awq and --load-format is runai_streamer; .*\.$"):
        check(AWQ, (), None, "runai_streamer", "the target")

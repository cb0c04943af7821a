"""Serves FP8 weights on a plain CPU: they are loaded as they are and then made dense. Other methods are refused.

SGLang's own kernels for quantised weights need an accelerator or AMX.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, input_to_float8
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped

from sglang_dflash.host.cpu.mla import is_latent

# The host answers an update of such a layer's model with this; else the update would end the scheduler.
NO_UPDATES = "The model's FP8 weights were made dense for the CPU: they cannot be updated while it serves."


class DenseFp8Config(Fp8Config):
    """FP8 weights, per block of the weight or per tensor, or made from plain weights while loading.

    Activations stay as they are, so answers differ from those of a GPU by the rounding of activations to FP8.
    """

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, *super().get_supported_act_dtypes()]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        skipped = is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping)
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if skipped else DenseFp8LinearMethod(self)
        if isinstance(layer, FusedMoE):
            return UnquantizedFusedMoEMethod() if skipped else DenseFp8MoEMethod(self)
        return None


class DenseFp8LinearMethod(UnquantizedLinearMethod):
    """Loads a linear layer's FP8 weight and makes it a plain layer."""

    def __init__(self, config: Fp8Config) -> None:
        super().__init__()
        self.quant_config = config

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        skip_block_quant_check: bool = False,
        **attributes: Any,
    ) -> None:
        Fp8LinearMethod.create_fp8_weight_(
            layer,
            block_quant=self.quant_config.weight_block_size is not None,
            quant_config=self.quant_config,
            use_mxfp8=False,
            output_size_per_partition=sum(output_partition_sizes),
            input_size_per_partition=input_size_per_partition,
            output_partition_sizes=output_partition_sizes,
            weight_loader=attributes.get("weight_loader"),
            skip_block_quant_check=skip_block_quant_check,
            input_size=input_size,
            output_size=output_size,
            is_checkpoint_fp8_serialized=self.quant_config.is_checkpoint_fp8_serialized,
            params_dtype=params_dtype,
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight, dtype, block = layer.weight.data, layer.orig_dtype, self.quant_config.weight_block_size
        if not self.quant_config.is_checkpoint_fp8_serialized:
            dense = _rounded(weight)
        elif block is not None:
            dense = block_quant_dequant(weight, layer.weight_scale_inv.data, block, dtype)
        else:
            parts = zip(weight.split(layer.logical_widths), layer.weight_scale.data, strict=True)
            dense = torch.cat([_scaled(part, scale, dtype) for part, scale in parts])
        layer.weight = torch.nn.Parameter(dense, requires_grad=False)
        for name in ("weight_scale", "weight_scale_inv", "input_scale"):
            layer.register_parameter(name, None)
        layer.quant_method = UnquantizedLinearMethod()
        layer._derived_weight_cache_error = NO_UPDATES


# The host chooses by this list, of class names, how a layer's shards are loaded; scales of blocks need the second way.
WEIGHT_LOADER_V2_SUPPORTED.append(DenseFp8LinearMethod.__name__)


class DenseFp8MoEMethod(UnquantizedFusedMoEMethod):
    """Loads the experts' FP8 weights and makes them plain ones."""

    def __init__(self, config: Fp8Config) -> None:
        super().__init__()
        self.quant_config = config
        self._dtype = torch.float32

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **attributes: Any,
    ) -> None:
        self.with_bias, self._dtype = with_bias, params_dtype
        Fp8MoEMethod.create_fp8_moe_weight_(
            layer=layer,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            block_quant=self.quant_config.weight_block_size is not None,
            quant_config=self.quant_config,
            use_mxfp8=False,
            is_checkpoint_fp8_serialized=self.quant_config.is_checkpoint_fp8_serialized,
            is_fp4_expert=False,
            params_dtype=params_dtype,
            with_bias=with_bias,
            **attributes,
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(layer, name).data
            dense = torch.empty(weight.shape, dtype=self._dtype)
            for expert in range(len(weight)):
                dense[expert] = self._dense(layer, name, weight[expert], expert)
            setattr(layer, name, torch.nn.Parameter(dense, requires_grad=False))
            for suffix in ("_scale", "_scale_inv"):
                layer.register_parameter(name + suffix, None)
        layer._derived_weight_cache_error = NO_UPDATES
        super().process_weights_after_loading(layer)

    def _dense(self, layer: torch.nn.Module, name: str, weight: torch.Tensor, expert: int) -> torch.Tensor:
        """weight: [out, in] of one expert; `w13_weight` stacks two projections, each with a scale of its own."""
        if not self.quant_config.is_checkpoint_fp8_serialized:
            return _rounded(weight)
        if self.quant_config.weight_block_size is not None:
            scales = getattr(layer, f"{name}_scale_inv").data[expert]
            return block_quant_dequant(weight, scales, self.quant_config.weight_block_size, self._dtype)
        scales = getattr(layer, f"{name}_scale").data[expert].view(-1)
        parts = zip(weight.chunk(len(scales)), scales, strict=True)
        return torch.cat([_scaled(part, scale, self._dtype) for part, scale in parts])


def _scaled(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (weight.float() * scale).to(dtype)


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """`weight` with the precision of FP8 and one scale, as SGLang makes it from a plain checkpoint."""
    return _scaled(*input_to_float8(weight), weight.dtype)


SERVED: dict[str, type[Fp8Config]] = {"fp8": DenseFp8Config}
"""Methods that this platform serves."""


def check(method: str | None, whose: str) -> None:
    """Raises ValueError, in one sentence, if weights of that method cannot be served on a plain CPU.

    whose: what has them, with its key or flag.
    """
    if method is not None and method.lower() not in SERVED:
        raise ValueError(
            f"{whose} is quantised by {method}, which needs an accelerator; on the CPU, {', '.join(SERVED)} is served."
        )


def install() -> None:
    """Registers the check of the target's weights, with speculation on or off."""
    register_resolution_hook("handle_speculative_decoding")(_check_target)


def _check_target(server_args: Any, previous: Any) -> None:
    try:
        target = model_config_of(server_args)
        check(target.quantization, "the target (--model-path, --quantization)")
        if target.quantization is not None and is_latent(target):
            raise ValueError(
                f"the target {', '.join(target.hf_config.architectures)} has latent attention (MLA) and is quantised "
                f"by {target.quantization}: on a CPU, MLA is served with plain weights only."
            )
    except ValueError as error:
        raise SystemExit(f"The server cannot start: {error}") from None
    previous(server_args)

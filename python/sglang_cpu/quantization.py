"""Serves quantised weights on a plain CPU by making them dense while they are loaded. Other methods are refused.

SGLang's own kernels for quantised weights need an accelerator or AMX. SGLang sees a plain model: layers, experts,
latent attention and shards are then those of plain weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.fp8_utils import input_to_float8
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod

from sglang_cpu.hooking import AROUND, hook
from sglang_cpu.mla import is_latent
from sglang_cpu.packings import Packing, dense_weights, read_packing

logger = logging.getLogger(__name__)

DESCRIBED = "sglang_dflash_quantization_config"
"""Where a model's config keeps what its checkpoint says of its weights."""

# SGLang answers an update of such a model's weights with this; else quantised tensors would be read as plain ones.
NO_UPDATES = "The model's {method} weights were made dense for the CPU: they cannot be updated while it serves."


def packing_of(hf_config: Any) -> Packing | None:
    """How a checkpoint's weights are packed; None if they are plain.

    Raises:
        ValueError: as `read_packing` does.
    """
    described = _described(hf_config)
    return None if described is None else read_packing(described, getattr(hf_config, "architectures", None) or ())


def _described(hf_config: Any) -> Mapping[str, Any] | None:
    for name in (DESCRIBED, "quantization_config", "compression_config"):
        described = getattr(hf_config, name, None)
        if described:
            return described if isinstance(described, Mapping) else described.to_dict()
    return None


@hook(
    "sglang.srt.configs.model_config.ModelConfig._verify_quantization",
    AROUND,
    why="a checkpoint that we make dense passes for a plain one",
    until="SGLang has CPU kernels without AMX",
)
def _verify_quantization(original: Any, model_config: Any) -> None:
    """Has SGLang take a checkpoint that we make dense for a plain one.

    Where the target's flag does not fit its checkpoint, SGLang would end with a traceback, before `_check_target`
    refuses the pair of them in one sentence.
    """
    hf_config = model_config.hf_config
    try:
        packing = packing_of(hf_config)
    except ValueError:
        packing = None  # `check` refuses it, in the main process
    flag = model_config.quantization
    if packing is None or (flag is not None and flag.lower() not in ("unquant", packing.method)):
        if flag is not None and _described(hf_config) is not None and not model_config.is_draft_model:
            return None
        return original(model_config)
    setattr(hf_config, DESCRIBED, _described(hf_config))
    hf_config.quantization_config = hf_config.compression_config = None
    model_config.quantization = None


@hook(
    "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights",
    AROUND,
    why="would read packed weights as they are",
    until="SGLang has CPU kernels without AMX",
)
def _load_dense(original: Any, loader: Any, model_config: Any, model: Any) -> Any:
    """The weights of a model, dense."""
    weights = original(loader, model_config, model)
    packing = packing_of(model_config.hf_config)
    if packing is None or model_config.quantization is not None:
        return weights
    model._derived_weight_cache_error = NO_UPDATES.format(method=packing.method)
    logger.info(
        "%s: weights packed by %s are made dense (%s) while they are loaded, and take the memory of plain ones.",
        model_config.model_path,
        packing.method,
        model_config.dtype,
    )
    return dense_weights(weights, packing, _maker(model), model_config.dtype)


def _maker(model: Any) -> Callable[[Callable[[], torch.Tensor]], Any]:
    """gpt-oss collects its checkpoint before it fills its layers, and makes what SGLang calls `_WeightCreator` one by
    one: so its dense weights are never there twice."""
    from sglang.srt.models.gpt_oss import GptOssForCausalLM, _WeightCreator

    return _WeightCreator if isinstance(model, GptOssForCausalLM) else lambda weight: weight()


class RoundedToFp8(Fp8Config):
    """`--quantization fp8` on a plain checkpoint: weights are rounded to FP8 after loading.

    Activations stay as they are, so answers differ from those of a GPU by the rounding of activations to FP8.
    """

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, *super().get_supported_act_dtypes()]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            return RoundedLinearMethod()
        return RoundedMoEMethod() if isinstance(layer, FusedMoE) else None


class RoundedLinearMethod(UnquantizedLinearMethod):
    """A plain linear layer whose weight is rounded to FP8 after loading."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data = _rounded(layer.weight.data)
        layer._derived_weight_cache_error = NO_UPDATES.format(method="fp8")
        super().process_weights_after_loading(layer)


# SGLang chooses by this list, of class names, how a layer's shards are loaded.
WEIGHT_LOADER_V2_SUPPORTED.append(RoundedLinearMethod.__name__)


class RoundedMoEMethod(UnquantizedFusedMoEMethod):
    """Plain experts whose weights are rounded to FP8 after loading."""

    def process_weights_after_loading(self, layer: Any) -> None:
        for weight in _experts(layer):
            weight.copy_(_rounded(weight))
        layer._derived_weight_cache_error = NO_UPDATES.format(method="fp8")
        super().process_weights_after_loading(layer)


def _experts(layer: Any) -> Iterator[torch.Tensor]:
    """The weight [out, in] of each expert; `w13_weight` stacks two projections, which get one scale."""
    for stacked in (layer.w13_weight.data, layer.w2_weight.data):
        yield from stacked


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """`weight` with the precision of FP8 and one scale, as SGLang makes it from a plain checkpoint."""
    packed, scale = input_to_float8(weight)
    return (packed.float() * scale).to(weight.dtype)


ONLINE: dict[str, type[Fp8Config]] = {"fp8": RoundedToFp8}
"""What `--quantization` may ask of a plain checkpoint."""


LOAD_FORMATS = ("auto", "safetensors", "pt", "npcache", "layered", "dummy")
"""`--load-format` with which SGLang hands a checkpoint's tensors over one by one, or reads none."""


def check(
    described: Mapping[str, Any] | None,
    architectures: tuple[str, ...],
    flag: str | None,
    load_format: Any,
    whose: str,
) -> None:
    """Raises ValueError, in one sentence, if such weights cannot be served on a plain CPU.

    described: the checkpoint's `quantization_config`. flag, load_format: what the user asks for. whose: what has them,
    with the names of its key and its flag.
    """
    packing = None
    if described:
        try:
            packing = read_packing(described, architectures)
        except ValueError as error:
            raise ValueError(f"{whose} is quantised by {error}.") from None
        if load_format not in LOAD_FORMATS:
            raise ValueError(
                f"{whose} is quantised by {packing.method} and --load-format is {load_format}; on the CPU, such "
                f"weights are read with {', '.join(LOAD_FORMATS)}."
            )
    allowed = list(ONLINE) if packing is None else [packing.method]
    if flag is not None and flag.lower() not in (*allowed, "unquant"):
        of_what = "a plain checkpoint" if packing is None else f"a checkpoint quantised by {packing.method}"
        raise ValueError(f"{whose} is to be quantised by {flag}; on the CPU, {of_what} allows: {', '.join(allowed)}.")


def install() -> None:
    """Registers the check of the target's weights, with speculation on or off."""
    register_resolution_hook("handle_speculative_decoding")(_check_target)


def _check_target(server_args: Any, previous: Any) -> None:
    try:
        target = model_config_of(server_args)
        architectures = tuple(target.hf_config.architectures)
        described = _described(target.hf_config)
        load_format = resolving_view(server_args).load_format
        check(described, architectures, target.quantization, load_format, "the target (--model-path, --quantization)")
        if target.quantization is not None and is_latent(target):
            raise ValueError(
                f"the target {', '.join(architectures)} has latent attention (MLA), and --quantization is "
                f"{target.quantization}: on a CPU, MLA is served with plain checkpoints and those that are quantised."
            )
    except ValueError as error:
        raise SystemExit(f"The server cannot start: {error}") from None
    previous(server_args)

"""Tiny random targets of the families that we serve, and a random draft for each, in the layout of checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kimi_k25 import config as kimi_k25_config
from kimi_k25 import publish as publish_kimi_k25
from mixed_models import GEMMA_3, GEMMA_3_VISION, MIMO_V2, QWEN2_MOE, publish_gemma_3, publish_mimo_v2
from mla_models import DEEPSEEK_V3, GLM_FLASH, KIMI_LINEAR, PLAIN_QUERIES, name_dense_layers
from nemotron_models import NEMOTRON_FAMILIES, NEMOTRON_H, NEMOTRON_H_MOE, publish_nemotron_h
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    KimiLinearConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLImageProcessor,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from equality import BLOCK_SIZE
from packed_checkpoints import pack
from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.serving import TINY_TARGET
from sglang_dflash.training import TrainOptions
from sglang_dflash.training.layout import new_config, save_draft

SCALE = 0.12  # of random weights: large enough for answers that do not repeat one token
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

COMMON: dict[str, Any] = {
    "vocab_size": 1792,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "eos_token_id": 1790,
    "pad_token_id": 1788,
}
NO_HEAD_DIM = {key: value for key, value in COMMON.items() if key != "head_dim"}
GDN: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,  # the same for SGLang, which does not read layer_types
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
# Of a family's text model, served alone or in a wrapper.
QWEN3_5 = {**GDN, "intermediate_size": 96, "rope_parameters": MROPE, "tie_word_embeddings": True}
QWEN3_5_MOE = {**GDN, **MOE, "shared_expert_intermediate_size": 32, "rope_parameters": MROPE}
QWEN3_VL = {"intermediate_size": 96, "rope_parameters": SECTIONS}
SLIDING: dict[str, Any] = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA_4: dict[str, Any] = {
    **SLIDING,
    "intermediate_size": 96,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 1856,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
GEMMA_4_MOE: dict[str, Any] = {
    **GEMMA_4,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


# Wrappers of a text model and a vision tower. Their tokenizer has four tokens behind those of the embedded pair's.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, VIDEO = range(1792, 1796)
TEXT = {**COMMON, "vocab_size": 1856}
PATCH: dict[str, int] = {"patch_size": 8, "temporal_patch_size": 2}
VISION: dict[str, Any] = {
    **PATCH,
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
DEEPSTACK = {**VISION, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]}  # Qwen3-VL MoE has three in SGLang
GEMMA_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 64,
}
# The same places as Qwen's tokens; SGLang reads `eoa_token_id`, as published configs name it.
GEMMA_TOKENS = ("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|audio|>")
GEMMA_IDS = {
    "boi_token_id": VISION_START,
    "eoi_token_id": VISION_END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "boa_token_id": 1796,
    "eoa_token_id": 1797,
    "audio_token_id": 1798,
}
VISION_IDS = {
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}


@dataclass(frozen=True, slots=True)
class Family:
    """One family of targets.

    Fields:
        config: of its tiny target.
        recurrent: whether it keeps recurrent state.
        sees: whether it reads images.
        taps: layers that its draft reads.
        remote: whether its processor or its config comes with the checkpoint.
        packed: the family whose target this is, the method that quantises it, and a seed; None: plain weights.
    """

    config: Callable[[], PreTrainedConfig]
    recurrent: bool
    sees: bool = False
    taps: tuple[int, ...] = (0, 2)
    remote: bool = False
    packed: tuple[str, str, int] | None = None

    @property
    def experts(self) -> bool:
        """Whether it is a mixture of experts."""
        text = self.config().get_text_config()
        return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _wrapper(
    kind: type[PreTrainedConfig],
    text: dict[str, Any],
    vision: dict[str, Any],
    recurrent: bool,
    tied: bool = False,
    **ids: int,
) -> Family:
    """A text model and a vision tower; `kind` is the class of their config, `ids` those of its tokens."""

    def config() -> PreTrainedConfig:
        parts = deepcopy({"text_config": {**TEXT, **text}, "vision_config": vision})  # transformers changes them
        return kind(**parts, tie_word_embeddings=tied, **(ids or VISION_IDS))

    return Family(config, recurrent, sees=True)


def _gemma_3_wrapper() -> PreTrainedConfig:
    """SGLang serves its text alone, unless it is started with --enable-multimodal."""
    ids = {"boi_token_index": VISION_START, "eoi_token_index": VISION_END, "image_token_index": IMAGE}
    parts = deepcopy({"text_config": {**TEXT, **GEMMA_3}, "vision_config": GEMMA_3_VISION})
    return Gemma3Config(**parts, mm_tokens_per_image=4, tie_word_embeddings=True, **ids)


FAMILIES = {
    "Qwen3.5": Family(lambda: Qwen3_5TextConfig(**deepcopy({**COMMON, **QWEN3_5})), recurrent=True),
    "Qwen3.5 MoE": Family(lambda: Qwen3_5MoeTextConfig(**deepcopy({**COMMON, **QWEN3_5_MOE})), recurrent=True),
    "Qwen3-Next": Family(
        lambda: Qwen3NextConfig(
            **COMMON,
            **GDN,
            **MOE,
            intermediate_size=96,
            shared_expert_intermediate_size=32,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        ),
        recurrent=True,
    ),
    # Drafts of Qwen2 and MiniMax-M2 read the last layer here, as NVIDIA's for MiniMax-M2 do.
    "Qwen2": Family(lambda: Qwen2Config(**NO_HEAD_DIM, intermediate_size=96), recurrent=False, taps=(0, 3)),
    "Qwen2 MoE": Family(lambda: Qwen2MoeConfig(**NO_HEAD_DIM, **QWEN2_MOE), recurrent=False),
    "Gemma 3": Family(lambda: Gemma3TextConfig(**COMMON, **deepcopy(GEMMA_3)), recurrent=False),
    "Gemma 3 wrapper": Family(_gemma_3_wrapper, recurrent=False),
    "MiMo-V2": Family(lambda: MiMoV2FlashConfig(**deepcopy({**COMMON, **MIMO_V2})), recurrent=False, remote=True),
    "GLM-4": Family(lambda: Glm4Config(**COMMON, intermediate_size=96), recurrent=False),
    "GLM-4 MoE": Family(
        lambda: Glm4MoeConfig(
            **COMMON,
            intermediate_size=96,
            moe_intermediate_size=48,
            n_routed_experts=8,
            num_experts_per_tok=2,
            use_qk_norm=True,
            routed_scaling_factor=1.5,
        ),
        recurrent=False,
    ),
    "MiniMax-M2": Family(
        lambda: MiniMaxM2Config(
            **COMMON,
            intermediate_size=48,
            num_local_experts=8,
            num_experts_per_tok=2,
            rotary_dim=16,
            use_qk_norm=True,
            use_routing_bias=True,
            scoring_func="sigmoid",
        ),
        recurrent=False,
        taps=(0, 3),
    ),
    "gpt-oss": Family(
        lambda: GptOssConfig(
            **COMMON,
            **SLIDING,
            intermediate_size=64,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters=dict(YARN),
        ),
        recurrent=False,
    ),
    "Qwen3 MoE": Family(lambda: Qwen3MoeConfig(**COMMON, **MOE, intermediate_size=96), recurrent=False),
    "DeepSeek-V3": Family(lambda: DeepseekV3Config(**deepcopy({**COMMON, **DEEPSEEK_V3})), recurrent=False),
    "Moonlight": Family(lambda: DeepseekV3Config(**deepcopy({**COMMON, **PLAIN_QUERIES})), recurrent=False),
    "GLM-4.7-Flash": Family(lambda: Glm4MoeLiteConfig(**deepcopy({**COMMON, **GLM_FLASH})), recurrent=False),
    "Kimi-Linear": Family(lambda: KimiLinearConfig(**deepcopy({**COMMON, **KIMI_LINEAR})), recurrent=True),
    "Nemotron-H": Family(lambda: NemotronHConfig(**{**COMMON, **NEMOTRON_H}), recurrent=True),
    "Nemotron-H MoE": Family(lambda: NemotronHConfig(**{**COMMON, **NEMOTRON_H_MOE}), recurrent=True, taps=(0, 4)),
    "Qwen3.5 wrapper": _wrapper(Qwen3_5Config, QWEN3_5, VISION, recurrent=True, tied=True),
    "Kimi K2.5": Family(lambda: kimi_k25_config(TEXT, VISION_IDS), recurrent=False, sees=True, remote=True),
    "Qwen3.5 MoE wrapper": _wrapper(Qwen3_5MoeConfig, QWEN3_5_MOE, VISION, recurrent=True),
    # The last two layers read the keys and values of the two before them.
    "Gemma 4": _wrapper(Gemma4Config, {**GEMMA_4, "num_kv_shared_layers": 2}, GEMMA_VISION, False, True, **GEMMA_IDS),
    "Gemma 4 MoE": _wrapper(Gemma4Config, GEMMA_4_MOE, GEMMA_VISION, False, True, **GEMMA_IDS),
    "Qwen3-VL": _wrapper(Qwen3VLConfig, QWEN3_VL, DEEPSTACK, recurrent=False),
    "Qwen3-VL MoE": _wrapper(Qwen3VLMoeConfig, {**QWEN3_VL, **MOE}, DEEPSTACK, recurrent=False),
}
# With seed 11, two groups of experts tie in a router of Kimi K2.5 in INT4: at one token their scores differ by 5e-9.
PACKED = {
    "gpt-oss in MXFP4": ("gpt-oss", "mxfp4", 11),
    "Kimi K2.5 in INT4": ("Kimi K2.5", "compressed-tensors", 12),
    "Qwen3.5 MoE in AWQ": ("Qwen3.5 MoE", "awq", 11),
    "Qwen3 MoE in GPTQ": ("Qwen3 MoE", "gptq", 11),
    "DeepSeek-V3 in FP8": ("DeepSeek-V3", "fp8", 11),
}
FAMILIES |= {name: replace(FAMILIES[packed[0]], packed=packed) for name, packed in PACKED.items()}


def plain_twin(target: Path) -> Path:
    """Where `make_target` writes, in float32, what the weights of a quantised target mean."""
    return target.with_name(f"{target.name}-plain")


def make_target(family: str, folder: Path, seed: int = 11, **changed: Any) -> Path:
    """Writes a random target of the family in float32 or quantised, with the embedded pair's tokenizer.

    changed: keys of the config.
    """
    packed = FAMILIES[family].packed
    if packed is not None:
        pack(make_target(packed[0], folder, packed[2]), plain_twin(folder), packed[1])
        return folder
    torch.manual_seed(seed)
    sees = FAMILIES[family].sees
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    config = FAMILIES[family].config()
    config.update(changed)
    model = kind.from_config(config).float()
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 or name.endswith((".bias", "_bias")):
            torch.nn.init.normal_(weight, std=SCALE)
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # of Gemma 4
            buffer.uniform_(0.5, 1.0)
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=SCALE)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy2(TINY_TARGET / name, folder / name)
    if sees:
        (_save_gemma_processor if family.startswith("Gemma") else _save_processor)(folder)
    if family == "Qwen3-VL MoE":
        _transpose_experts(folder / "model.safetensors")
    if family == "Kimi K2.5":
        publish_kimi_k25(folder, IMAGE)
    if family == "Kimi-Linear":
        name_dense_layers(folder / "model.safetensors")
    if family == "Gemma 3 wrapper":
        publish_gemma_3(folder / "model.safetensors")
    if family == "MiMo-V2":
        publish_mimo_v2(folder)
    if family in NEMOTRON_FAMILIES:
        publish_nemotron_h(folder)
    return folder


def _save_processor(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    size = {"shortest_edge": 16 * 16, "longest_edge": 160 * 160}  # in pixels; 16 x 16 of them make one token
    mean_and_deviation = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessor(**PATCH, merge_size=2, size=size, **mean_and_deviation)
    videos = Qwen3VLVideoProcessor(**PATCH, merge_size=2)
    Qwen3VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(folder)


def _save_gemma_processor(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(GEMMA_TOKENS)})
    names = ("boi_token", "eoi_token", "image_token", "video_token", "boa_token", "eoa_token", "audio_token")
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=dict(zip(names, GEMMA_TOKENS, strict=True)))
    sizes = {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2}
    images, videos = Gemma4ImageProcessor(**sizes), Gemma4VideoProcessor(**sizes)
    parts = (Gemma4AudioFeatureExtractor(), images, tokenizer, videos)
    Gemma4Processor(*parts, chat_template=tokenizer.chat_template).save_pretrained(folder)


def _transpose_experts(checkpoint: Path) -> None:
    """Published checkpoints of Qwen3-VL MoE hold [E, in, out], and SGLang reads no other; transformers writes the
    transpose."""
    weights = load_file(checkpoint)
    turned = {name: w.transpose(1, 2).contiguous() if ".experts." in name else w for name, w in weights.items()}
    save_file(turned, checkpoint, metadata={"format": "pt"})


def make_draft(family: str, target: Path, folder: Path) -> Path:
    """Writes a random draft for the target: one sliding and one full layer, so that both kinds run."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = AutoConfig.from_pretrained(target).get_text_config()
    options = TrainOptions(
        target=str(target),
        data=(__file__,),
        output=str(folder),
        layers=2,
        block_size=BLOCK_SIZE,
        taps=FAMILIES[family].taps,
        sliding_window=64,
        sliding_layers=1,
    )
    torch.manual_seed(12)
    save_draft(DFlashDraftModel(new_config(text, options, tokenizer.mask_token_id)), folder)
    return folder

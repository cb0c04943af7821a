"""A tiny Kimi K2.5 in the layout of published checkpoints: latent attention, experts and a vision tower."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

from mla_models import DEEPSEEK_V3
from safetensors.torch import load_file, save_file
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config

PROCESSOR = Path(__file__).parent / "remote" / "processing_kimi_k25.py"
VISION: dict[str, Any] = {
    "patch_size": 8,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "pos_emb_time": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
}
RENAMED = {  # by transformers, and in published checkpoints
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.proj.": "vision_tower.patch_embed.proj.",
}


def config(text: dict[str, Any], ids: dict[str, int]) -> Kimi_K25Config:
    """text: what the text models of all families have in common."""
    parts = deepcopy({"text_config": {**text, **DEEPSEEK_V3, "model_type": "deepseek_v3"}, "vision_config": VISION})
    return Kimi_K25Config(**parts, projection_hidden_size=VISION["hidden_size"], tie_word_embeddings=False, **ids)


def publish(folder: Path, image: int) -> None:
    """Gives what transformers saved the names of published checkpoints, the config's keys that SGLang reads, and a
    processor of its own.

    image: the id that stands for an image in a prompt.
    """
    weights = load_file(folder / "model.safetensors")
    named = {}
    for name, weight in weights.items():
        for saved, published in RENAMED.items():
            if name.startswith(saved):
                name = published + name[len(saved) :]
        named[name] = weight
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["media_placeholder_token_id"] = image
    settings["architectures"] = ["KimiK25ForConditionalGeneration"]
    settings["text_config"]["architectures"] = ["DeepseekV3ForCausalLM"]
    vision = settings["vision_config"]
    vision |= {f"init_{key}": vision[key] for key in ("pos_emb_height", "pos_emb_width", "pos_emb_time")}
    vision |= {"vt_hidden_size": vision["hidden_size"], "text_hidden_size": settings["text_config"]["hidden_size"]}
    vision |= {"mm_hidden_size": vision["hidden_size"], "merge_type": "sd2_tpool"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    shutil.copy2(PROCESSOR, folder)
    auto_map = {"AutoProcessor": "processing_kimi_k25.KimiK25Processor"}
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "KimiK25Processor", "auto_map": auto_map})
    )

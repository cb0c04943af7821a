"""The embedded draft as others publish drafts: the same draft in the layout of each trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET

NEVER_DRAFTED = range(130, 139)  # bytes that no text of the embedded pair has
RUNTIME_KEYS = ("architectures", "block_size", "dflash_config", "model_type", "dtype", "num_target_layers")
Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


def publish(layout: str, folder: Path, draft: Path = TINY_DRAFT) -> Path:
    """Writes a plain draft in a layout of `LAYOUTS`."""
    shutil.copytree(draft, folder)
    config, weights = LAYOUTS[layout](
        json.loads((draft / "config.json").read_text()), load_file(draft / "model.safetensors")
    )
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _target_embedding() -> torch.Tensor:
    return load_file(TINY_TARGET / "model.safetensors")["model.embed_tokens.weight"]


def _target_head() -> torch.Tensor:
    tensors = load_file(TINY_TARGET / "model.safetensors")
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


def _speculators(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """As speculators 0.7 saves it: nested, ids of layers one higher, a head over fewer ids, a copied embedding."""
    dflash, size = config["dflash_config"], config["vocab_size"]
    kept = torch.tensor([one for one in range(size) if one not in NEVER_DRAFTED])
    inner = {key: value for key, value in config.items() if key not in RUNTIME_KEYS} | {"model_type": "qwen3"}
    published = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in dflash["target_layer_ids"]],
        "block_size": config["block_size"],
        "draft_vocab_size": len(kept),
        "dtype": "bfloat16",
        "mask_token_id": dflash["mask_token_id"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "tiny"}},
        "speculators_model_type": "dflash",
        "speculators_version": "0.7.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": inner,
    }
    seen = torch.zeros(size, dtype=torch.bool)
    seen[kept] = True
    head = {"lm_head.weight": _target_head()[kept], "d2t": kept - torch.arange(len(kept)), "t2d": seen}
    return published, weights | head | {"embed_tokens.weight": _target_embedding()}


def _whole_speculators(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """As speculators 0.9 saves a draft whose vocabulary is the target's: no head, no embedding."""
    published, _ = _speculators(config, weights)
    return published | {"draft_vocab_size": config["vocab_size"], "speculators_version": "0.9.0"}, weights


def _deepspec(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """Flat, with a copy of what the target's config has; the anchor's row gives the first draft."""
    dflash = config.pop("dflash_config")
    head = {"embed_tokens.weight": _target_embedding(), "lm_head.weight": _target_head()}
    added = {"markov_rank": 0, "enable_confidence_head": False, "num_anchors": 512, "partial_rotary_factor": 0.25}
    return config | dflash | added | {"architectures": ["Qwen3DSparkModel"]}, weights | head


def _nemo(config: Config, weights: Weights) -> tuple[Config, Weights]:
    config["dflash_config"]["block_size"] = config["block_size"]
    return config | {"architectures": ["Qwen3DFlashDraftModel"], "is_causal": False}, weights


def _modelopt(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """A window wider than every test's context."""
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 1500, "causal": False}
    return config | {"sliding_window": 1500}, weights


def _jetspec(config: Config, weights: Weights) -> tuple[Config, Weights]:
    config["dflash_config"] |= {"causal_head": False}
    return config, weights


def _nested(config: Config, weights: Weights) -> tuple[Config, Weights]:
    config["dflash_config"]["block_size"] = config.pop("block_size")
    return config, weights


LAYOUTS: dict[str, Callable[[Config, Weights], tuple[Config, Weights]]] = {
    "z-lab, nested": _nested,
    "speculators": _speculators,
    "speculators, whole": _whole_speculators,
    "DeepSpec": _deepspec,
    "NeMo Automodel": _nemo,
    "ModelOpt": _modelopt,
    "JetSpec": _jetspec,
}
SAME_STEPS = [name for name in LAYOUTS if name != "DeepSpec"]
"""Layouts in which the embedded draft drafts the same; DeepSpec's rows mean other positions."""

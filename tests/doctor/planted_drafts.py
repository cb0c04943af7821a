"""Makes drafts of the embedded pair that are served without an error and lose acceptance, or that cannot be served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.serving import TINY_DRAFT

Change = Callable[[dict[str, Any]], Any]
Tensors = dict[str, torch.Tensor]


def changed_config(folder: Path, change: Change, source: Path = TINY_DRAFT) -> Path:
    """A copy of a model with another config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed_weights(folder: Path, change: Callable[[Tensors], Tensors], source: Path = TINY_DRAFT) -> Path:
    """A copy of a model with other tensors."""
    shutil.copytree(source, folder)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dflash(**keys: Any) -> Change:
    """Other keys of `dflash_config`."""
    return lambda config: config["dflash_config"].update(keys)


def top(**keys: Any) -> Change:
    return lambda config: config.update(keys)


def rope_theta(theta: float) -> Change:
    """In both of transformers' spellings."""
    return top(rope_theta=theta, rope_parameters={"rope_theta": theta, "rope_type": "default"})


def window(size: int) -> Change:
    """A window in all layers, which the embedded draft was not trained with."""
    return top(layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=size)

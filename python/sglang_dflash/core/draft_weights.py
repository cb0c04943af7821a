"""Judges a draft's weights by the headers of its safetensors files, before any tensor is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.core.draft_config import DraftConfig

Shape = tuple[int, ...]
INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
LENGTH_BYTES, LONGEST_HEADER = 8, 100_000_000
"""A file begins with the length of its header (little-endian); the format's own limit of that length."""
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Other names under which SGLang takes a tensor (models/dflash.py)."""


def read_shapes(folder: Path) -> dict[str, Shape] | None:
    """Tensor -> shape, of all safetensors files of a checkpoint. None: its weights are in another format.

    Raises:
        ValueError: one sentence that names the file and what is wrong with it.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        named = {folder / name for name in _weight_map(index).values()}
        lost = sorted(file.name for file in named if not file.exists())
        if lost:
            raise ValueError(
                f"the draft's {INDEX} names {', '.join(lost)}, which is not in {folder}: download it again."
            )
        files = sorted(named)
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.gguf")):
            return None
        raise ValueError(f"there are no weights (*.safetensors) in the draft's folder {folder}.")
    shapes: dict[str, Shape] = {}
    for file in files:
        shapes.update(_shapes_of(file))
    return shapes


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"the draft's {index} cannot be read: it must hold a weight_map.") from None
    return found


def _shapes_of(file: Path) -> dict[str, Shape]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        begin = opened.read(len(LFS_POINTER))
        if begin == LFS_POINTER:
            raise ValueError(f"the draft's {file} is a pointer of Git LFS and no weights: run `git lfs pull` there.")
        length = int.from_bytes(begin[:LENGTH_BYTES], "little")
        if size < LENGTH_BYTES or length > min(size, LONGEST_HEADER):
            raise ValueError(f"the draft's {file} has {size} bytes and no whole header: it is empty, cut or damaged.")
        opened.seek(LENGTH_BYTES)
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ValueError(f"the draft's {file} has no header of the safetensors format: it is damaged.") from None
    needed = LENGTH_BYTES + length + end
    if size < needed:
        raise ValueError(f"the draft's {file} is cut: it has {size} of {needed} bytes. Download it again.")
    return shapes


def expected_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Tensor -> shape, of every tensor that all drafts of this config have."""
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    layer: dict[str, Shape] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {f"layers.{n}.{name}.weight": shape for n in range(config.num_layers) for name, shape in layer.items()}
    taps = len(config.target_layer_ids)
    return shapes | {"norm.weight": (hidden,), "hidden_norm.weight": (hidden,), "fc.weight": (hidden, taps * hidden)}


def check_weights(shapes: Mapping[str, Shape], config: DraftConfig) -> list[str]:
    """Compares a checkpoint's tensors with its config.

    Args:
        shapes: of `read_shapes`.

    Returns:
        Names of layers in the weights that the config leaves out, sorted.

    Raises:
        ValueError: one sentence that names the first tensor that is missing or has another shape.
    """
    found = {}
    for name, shape in shapes.items():
        short = name.removeprefix("model.")
        found[ALIASES.get(short, short)] = shape
    expected = expected_shapes(config)
    plain = config.quantization is None
    modules = {name.rpartition(".")[0] for name in found}  # a quantised weight has other names and shapes
    missing = [name for name in expected if name not in found and (plain or name.rpartition(".")[0] not in modules)]
    if missing:
        others = f" and {len(missing) - 1} other tensors" if len(missing) > 1 else ""
        raise ValueError(
            f"the draft's weights lack {missing[0]}{others}, which its config.json asks for (num_hidden_layers is "
            f"{config.num_layers}): the two are not of one draft, or the weights are incomplete."
        )
    for name, shape in expected.items():
        own = found.get(name)
        if own is not None and own != shape and (plain or len(shape) == 1):
            how = " (transposed)" if own == shape[::-1] else ""
            raise ValueError(
                f"the draft's {name} is {list(own)}{how}, and its config.json asks for {list(shape)}: {_sizes(config)}."
            )
    layers = {".".join(name.split(".")[:2]) for name in found if name.startswith("layers.")}
    return sorted(layers - {f"layers.{n}" for n in range(config.num_layers)})


def _sizes(config: DraftConfig) -> str:
    return (
        f"hidden_size {config.hidden_size}, intermediate_size {config.intermediate_size}, head_dim {config.head_dim}, "
        f"{config.num_heads} heads, {config.num_kv_heads} KV heads, {len(config.target_layer_ids)} target_layer_ids"
    )

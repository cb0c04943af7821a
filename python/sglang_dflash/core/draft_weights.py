"""Judges a draft's weights by the headers of its safetensors files, before any tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.core.draft_config import DraftConfig

Shape = tuple[int, ...]
INDEX = "model.safetensors.index.json"
NO_WEIGHTS = ("mask_embedding.pt", "training_state.pt")
LFS_POINTER = b"version https://git-lfs"
LENGTH_BYTES, LONGEST_HEADER = 8, 100_000_000
"""A file begins with the length of its header (little-endian); the format's own limit of that length."""
ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Other names under which SGLang takes a tensor (models/dflash.py)."""
OTHERS = re.compile(r"^(embed_tokens|lm_head)\.|^[dt]2[td]$|rotary_emb")
"""Copies of the target's tensors, and tables."""


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
        if any(file.suffix in (".bin", ".gguf", ".pt") and file.name not in NO_WEIGHTS for file in folder.iterdir()):
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
    layer = {f"{name}.weight": shape for name, shape in layer.items()}
    if config.attention_bias:
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
        layer |= {f"self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    if config.attention_sinks:
        layer["self_attn.attention_sink_bias"] = (config.num_heads,)
    taps = len(config.target_layer_ids)
    shapes = {f"layers.{n}.{name}": shape for n in range(config.num_layers) for name, shape in layer.items()}
    shapes |= {"norm.weight": (hidden,), "hidden_norm.weight": (hidden,), "fc.weight": (hidden, taps * hidden)}
    if config.convolution is not None:
        convolutions = (f"layers.{n}.{part}_conv" for n in range(config.num_layers) for part in ("attention", "mlp"))
        count, groups = config.convolution.taps, hidden // config.convolution.group_size
        for name in convolutions:
            shapes[f"{name}.base_kernel"] = (2, count, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * count * groups, hidden)
    if config.selector is not None:
        rank, ids = config.selector.rank, config.selector.vocab_size
        tables: dict[str, Shape] = {"predecessor_codebook": (ids, rank), "successor_codebook": (ids, rank)}
        tables["hidden_projection.weight"] = (rank, hidden)
        shapes |= {f"candidate_selector.{name}": shape for name, shape in tables.items()}
    if config.domino is not None:
        gru, size = config.domino.gru_size, config.domino.rank
        shapes |= {"prefix_gru.weight_ih_l0": (3 * gru, hidden), "prefix_gru.weight_hh_l0": (3 * gru, gru)}
        shapes |= {"embed_proj.0.weight": (size, hidden + gru), "embed_proj.2.weight": (config.domino.vocab_size, size)}
    if config.head_vocab_size is not None:
        shapes |= {"lm_head.weight": (config.head_vocab_size, hidden), "d2t": (config.head_vocab_size,)}
    return shapes


def check_weights(shapes: Mapping[str, Shape], config: DraftConfig) -> list[str]:
    """Compares a checkpoint's tensors with its config.

    Args:
        shapes: of `read_shapes`.

    Returns:
        What nothing reads, sorted: layers that the config leaves out, and tensors of other names.

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
    left = layers - {f"layers.{n}" for n in range(config.num_layers)}
    bases = {name.rpartition(".")[0] for name in expected}
    for name in found:
        known = name in expected or (not plain and name.rpartition(".")[0] in bases)
        if not known and ".".join(name.split(".")[:2]) not in left and not OTHERS.search(name):
            left.add(name)
    return sorted(left)


def _sizes(config: DraftConfig) -> str:
    return (
        f"hidden_size {config.hidden_size}, intermediate_size {config.intermediate_size}, head_dim {config.head_dim}, "
        f"{config.num_heads} heads, {config.num_kv_heads} KV heads, {len(config.target_layer_ids)} target_layer_ids"
    )

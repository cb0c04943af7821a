"""The embedded pair in matrices of Qwen3-8B's shape: it costs what such a pair costs, and accepts as the small one.

The small pair's weights fill a corner of each matrix. More layers, heads and columns compute on random weights, but
what they compute is multiplied by zero. So the tokens are the small pair's, up to rounding. Dummy weights have no
tokens that a draft could be right about.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MARK, MARK_WEIGHT, UNLIKELY = 2.0**-10, 2.0**14, -(2.0**10)
"""A mark in one more dimension of every embedding, which all norms but the last hide. The head's further ids are
multiplied with it, so that none is ever chosen."""
STD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """What the pair grows to. The hidden size is 4^n times the small one, so that norms are scaled exactly."""

    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 64
    kv_heads: int = 16
    layers: int = 36
    draft_layers: int = 5
    vocab: int = 151936


class _Matrices:
    """Random tensors whose corners hold a small model's weights."""

    def __init__(self, shape: Shape, small: dict[str, Any], device: str) -> None:
        self._shape, self._small, self._device = shape, small, device
        self._generator = torch.Generator(device).manual_seed(0)
        self._scale = (small["hidden_size"] / shape.hidden) ** 0.5
        self._dim = small["head_dim"]
        groups = small["num_attention_heads"] // small["num_key_value_heads"], shape.heads // shape.kv_heads
        # Queries of one head of keys stand together.
        self._queries = [
            head // groups[0] * groups[1] + head % groups[0] for head in range(small["num_attention_heads"])
        ]

    def random(self, *sizes: int) -> torch.Tensor:
        values = torch.empty(*sizes, device=self._device, dtype=torch.float32)
        return values.normal_(0.0, STD, generator=self._generator).bfloat16()

    def norm(self, weight: torch.Tensor | None, mark: float = 0.0) -> torch.Tensor:
        """A norm that sees the small model's dimensions, with the values that the small norm gives them."""
        grown = torch.zeros(self._shape.hidden, dtype=torch.bfloat16, device=self._device)
        count = self._small["hidden_size"]
        grown[:count] = self._scale * (1.0 if weight is None else weight.to(self._device))
        grown[count] = mark
        return grown

    def into(self, weight: torch.Tensor | None, rows: int, places: torch.Tensor | None = None) -> torch.Tensor:
        """A matrix that reads the hidden states. weight: [n, small hidden]; places: of its rows; None: the first."""
        grown = self.random(rows, self._shape.hidden)
        if weight is not None:
            at = torch.arange(len(weight)) if places is None else places
            grown[at.to(self._device), : weight.shape[1]] = weight.to(self._device)
        return grown

    def back(self, weight: torch.Tensor | None, columns: int, places: torch.Tensor | None = None) -> torch.Tensor:
        """A matrix that adds to the hidden states: only the small model's columns and dimensions."""
        grown = torch.zeros(self._shape.hidden, columns, dtype=torch.bfloat16, device=self._device)
        if weight is not None:
            at = torch.arange(weight.shape[1]) if places is None else places
            grown[: len(weight), at.to(self._device)] = weight.to(self._device)
        return grown

    def layer(self, prefix: str, own: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """A layer's tensors by name. own: the small layer's, by name without the prefix; None: a layer that adds
        nothing."""
        shape, take = self._shape, (own or {}).get
        queries = torch.tensor([head * self._dim + i for head in self._queries for i in range(self._dim)])
        ones = torch.ones(self._dim, dtype=torch.bfloat16)
        tensors = {
            "input_layernorm.weight": self.norm(take("input_layernorm.weight")),
            "post_attention_layernorm.weight": self.norm(take("post_attention_layernorm.weight")),
            "self_attn.q_norm.weight": take("self_attn.q_norm.weight", ones),
            "self_attn.k_norm.weight": take("self_attn.k_norm.weight", ones),
            "self_attn.q_proj.weight": self.into(take("self_attn.q_proj.weight"), shape.heads * self._dim, queries),
            "self_attn.k_proj.weight": self.into(take("self_attn.k_proj.weight"), shape.kv_heads * self._dim),
            "self_attn.v_proj.weight": self.into(take("self_attn.v_proj.weight"), shape.kv_heads * self._dim),
            "self_attn.o_proj.weight": self.back(take("self_attn.o_proj.weight"), shape.heads * self._dim, queries),
            "mlp.gate_proj.weight": self.into(take("mlp.gate_proj.weight"), shape.intermediate),
            "mlp.up_proj.weight": self.into(take("mlp.up_proj.weight"), shape.intermediate),
            "mlp.down_proj.weight": self.back(take("mlp.down_proj.weight"), shape.intermediate),
        }
        return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}

    def embedding(self, weight: torch.Tensor) -> torch.Tensor:
        grown = torch.zeros(self._shape.vocab, self._shape.hidden, dtype=torch.bfloat16, device=self._device)
        rows, count = weight.shape
        grown[:rows, :count], grown[:rows, count] = weight.to(self._device), MARK
        return grown

    def head(self, weight: torch.Tensor) -> torch.Tensor:
        rows, count = weight.shape
        grown = self.random(self._shape.vocab, self._shape.hidden)
        grown[:, : count + 1] = 0.0
        grown[:rows, :count], grown[rows:, count] = weight.to(self._device), UNLIKELY
        return grown


MEMORY, ROOM = Path("/dev/shm"), 40 * 2**30


@contextmanager
def grown_pair(shape: Shape, device: str) -> Iterator[tuple[Path, Path]]:
    """`make_grown_pair` in a folder that goes with the block: in memory where there is room, for it is read at once."""
    room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
    with tempfile.TemporaryDirectory(dir=MEMORY if room else None) as folder:
        yield make_grown_pair(Path(folder), shape, device)


def make_grown_pair(folder: Path, shape: Shape, device: str) -> tuple[Path, Path]:
    """Writes the folders of target and draft, 19 GB of the default shape; returns both. device: that computes them."""
    paths = folder / "target", folder / "draft"
    for path, source, make in zip(paths, (TINY_TARGET, TINY_DRAFT), (_target, _draft), strict=True):
        path.mkdir(parents=True, exist_ok=True)
        config = json.loads((source / "config.json").read_text())
        small = load_file(source / "model.safetensors")
        matrices = _Matrices(shape, config, device)
        _write(path, make(small, shape, matrices, config["num_hidden_layers"]))
        (path / "config.json").write_text(json.dumps(_config(config, shape, source == TINY_DRAFT), indent=1) + "\n")
        for file in FILES:
            shutil.copyfile(TINY_TARGET / file, path / file)
    return paths


Parts = Iterator[dict[str, torch.Tensor]]


def _target(small: dict[str, torch.Tensor], shape: Shape, matrices: _Matrices, layers: int) -> Parts:
    embedding = small["model.embed_tokens.weight"]
    yield {"model.embed_tokens.weight": matrices.embedding(embedding)}
    yield {"lm_head.weight": matrices.head(embedding)}
    yield {"model.norm.weight": matrices.norm(small["model.norm.weight"], MARK_WEIGHT)}
    yield from _layers(small, "model.layers.", layers, shape.layers, matrices.layer)


def _draft(small: dict[str, torch.Tensor], shape: Shape, matrices: _Matrices, layers: int) -> Parts:
    count, taps = small["fc.weight"].shape[0], len(_taps(shape))
    fc = torch.zeros(shape.hidden, taps * shape.hidden, dtype=torch.bfloat16)
    for tap, part in enumerate(small["fc.weight"].split(count, dim=1)):
        fc[:count, tap * shape.hidden : tap * shape.hidden + count] = part
    norms = {"hidden_norm.weight": 0.0, "norm.weight": MARK_WEIGHT}
    yield {"fc.weight": fc} | {name: matrices.norm(small[name], mark) for name, mark in norms.items()}
    yield from _layers(small, "layers.", layers, shape.draft_layers, matrices.layer)


def _layers(
    small: dict[str, torch.Tensor], prefix: str, count: int, grown: int, make: Callable[..., dict[str, torch.Tensor]]
) -> Parts:
    for number in range(grown):
        own = f"{prefix}{number}."
        kept = {name.removeprefix(own): tensor for name, tensor in small.items() if name.startswith(own)}
        yield make(own, kept if number < count else None)


def _taps(shape: Shape) -> list[int]:
    """The small draft's taps, and two deeper ones that it does not read."""
    own = json.loads((TINY_DRAFT / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    return [*own, shape.layers - 4, shape.layers - 3]


def _config(small: dict[str, Any], shape: Shape, is_draft: bool) -> dict[str, Any]:
    layers = shape.draft_layers if is_draft else shape.layers
    grown = small | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "rms_norm_eps": small["rms_norm_eps"] * small["hidden_size"] / shape.hidden,
    }
    if is_draft:
        own = small["dflash_config"] | {"target_layer_ids": _taps(shape)}
        grown |= {"num_target_layers": shape.layers, "dflash_config": own}
    return grown


def _write(path: Path, parts: Parts) -> None:
    """One file for each part."""
    places: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(parts):
        file = f"model-{number:05}.safetensors"
        save_file({name: tensor.cpu().clone() for name, tensor in tensors.items()}, path / file)
        places |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")

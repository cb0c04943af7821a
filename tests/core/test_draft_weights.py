"""Weights that fit their config, and those that are refused, with the message that the user gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.core import draft_weights
from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.reference import DFlashConfig, DFlashDraftModel
from sglang_dflash.serving import TINY_DRAFT

CONFIG = DraftConfig.from_dict(json.loads((Path(TINY_DRAFT) / "config.json").read_text()))
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    """Of the tiny pair's draft, without their values."""
    shapes = draft_weights.read_shapes(Path(TINY_DRAFT))
    assert shapes is not None
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def judged(tensors: Tensors, folder: Path, config: DraftConfig = CONFIG) -> list[str]:
    save_file(tensors, folder / "model.safetensors")
    shapes = draft_weights.read_shapes(folder)
    assert shapes is not None
    return draft_weights.check_weights(shapes, config)


def test_shapes_are_those_of_the_tensors():
    """Fails where a header is misread."""
    (file,) = Path(TINY_DRAFT).glob("*.safetensors")
    expected = {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    assert draft_weights.read_shapes(Path(TINY_DRAFT)) == expected


@pytest.mark.parametrize("prefix", ["", "model."])
def test_whole_weights_are_taken(prefix, tensors, tmp_path):
    """Fails where a draft that can be served is refused."""
    assert judged({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path) == []


def test_the_names_of_another_export_are_taken(tensors, tmp_path):
    """Fails where names are refused that SGLang reads."""
    tensors["encoder.fc.weight"], tensors["encoder.output_norm_enc.weight"] = (
        tensors.pop("fc.weight"),
        tensors.pop("hidden_norm.weight"),
    )
    assert judged(tensors, tmp_path) == []


def _without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def _transposed(tensors: Tensors) -> Tensors:
    return tensors | {"fc.weight": tensors["fc.weight"].T.contiguous()}


def _same(tensors: Tensors) -> Tensors:
    return tensors


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (_without("layers.1."), {}, r"lack layers.1.input_layernorm.weight and 10 other.*num_hidden_layers is 2"),
        (_without("fc."), {}, r"lack fc.weight, which"),
        (_without("hidden_norm"), {}, r"lack hidden_norm.weight, which"),
        (_transposed, {}, r"fc.weight is \[768, 256\] \(transposed\).*asks for \[256, 768\]"),
        (_same, {"num_layers": 3}, r"lack layers.2.input_layernorm.weight and 10 other.*num_hidden_layers is 3"),
        (
            _same,
            {"intermediate_size": 512},
            r"mlp.gate_proj.weight is \[576, 256\].*\[512, 256\].*intermediate_size 512",
        ),
        (_same, {"head_dim": 32}, r"q_proj.weight is \[256, 256\].*\[128, 256\].*head_dim 32"),
        (_same, {"target_layer_ids": (1, 3)}, r"fc.weight is \[256, 768\].*\[256, 512\].*2 target_layer_ids"),
    ],
)
def test_weights_of_another_config_are_refused(change, config, words, tensors, tmp_path):
    """Fails where a draft would start and accept nothing, or end in a traceback after the target's weights are read."""
    with pytest.raises(ValueError, match=words):
        judged(change(tensors), tmp_path, replace(CONFIG, **config))


def test_layers_that_the_config_leaves_out_are_named(tensors, tmp_path):
    """Fails where a draft loses layers without a word."""
    assert judged(tensors, tmp_path, replace(CONFIG, num_layers=1)) == ["layers.1"]


def test_quantised_weights_have_other_shapes(tensors, tmp_path):
    """Fails where packed weights are judged as plain ones, or a lost layer of them is not missed."""
    config = replace(CONFIG, quantization={"quant_method": "gptq"})
    packed = {name.replace("_proj.weight", "_proj.qweight"): tensor for name, tensor in tensors.items()}
    assert judged(packed, tmp_path, config) == []
    with pytest.raises(ValueError, match=r"lack layers\.0\.mlp\.up_proj\.weight"):
        judged(_without("layers.0.mlp.up_proj")(packed), tmp_path, config)


def _file(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def _cut(folder: Path) -> None:
    save_file({"fc.weight": torch.zeros(100)}, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-50])


def _lost_shard(folder: Path) -> None:
    save_file({"fc.weight": torch.zeros(1)}, folder / "model-00001-of-00002.safetensors")
    names = {"fc.weight": "model-00001-of-00002.safetensors", "norm.weight": "model-00002-of-00002.safetensors"}
    (folder / draft_weights.INDEX).write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "there are no weights"),
        (_file(b""), "0 bytes and no whole header: it is empty"),
        (_file(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "pointer of Git LFS"),
        (_file((10).to_bytes(8, "little") + b"no header!"), "no header of the safetensors format"),
        (_file((10).to_bytes(8, "little") + b"{}"), "is cut: it has 10 of 18 bytes"),
        (_cut, r"is cut: it has \d+ of \d+ bytes"),
        (_lost_shard, "names model-00002-of-00002.safetensors, which is not in"),
        (lambda folder: (folder / draft_weights.INDEX).write_text("{}"), "must hold a weight_map"),
    ],
)
def test_damaged_files_are_refused(make, words, tmp_path):
    """Fails where a damaged file ends the start in a traceback."""
    make(tmp_path)
    with pytest.raises(ValueError, match=words):
        draft_weights.read_shapes(tmp_path)


def test_other_formats_are_not_judged(tmp_path):
    """Fails where weights that SGLang reads are refused for their format."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert draft_weights.read_shapes(tmp_path) is None


def test_what_nothing_reads_is_named(tmp_path: Path) -> None:
    """Fails where a tensor that changes the draft is left out in silence, or a known head is called unknown."""
    tensors = load_file(Path(TINY_DRAFT) / "model.safetensors")
    more = {"hidden_dim_adapter.proj.weight": torch.zeros(2, 2), "embed_tokens.weight": torch.zeros(3, 2)}
    assert judged(tensors | more, tmp_path) == ["hidden_dim_adapter.proj.weight"]


@pytest.mark.parametrize("head", ["dflash2", "domino", "sinks"])
def test_shapes_of_heads(head: str) -> None:
    """Fails where the shapes of a head differ from the reference's, so that a sound draft is refused, or a head that is
    missing is not named."""
    config = json.loads((Path(TINY_DRAFT) / "config.json").read_text())
    if head == "dflash2":
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= {
            "conv_kernel_size": 3,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 4,
        }
    elif head == "domino":
        domino = {"projector_type": "domino", "gru_hidden_dim": 32, "emb_dim": 24, "shift_label": True}
        config["dflash_config"] |= domino | {"pure_draft_prefix_len": 1}
    else:
        config["dflash_config"]["attention_sink_bias"] = config["attention_bias"] = True
    with torch.device("meta"):
        shapes = {name: tuple(one.shape) for name, one in DFlashDraftModel(DFlashConfig(**config)).state_dict().items()}
    draft = DraftConfig.from_dict(config)
    assert draft_weights.expected_shapes(draft) == shapes
    added = sorted(set(shapes) - set(draft_weights.expected_shapes(CONFIG)))
    assert len(added) > 3
    with pytest.raises(ValueError, match=f"lack {re.escape(added[0])}"):
        draft_weights.check_weights({name: shape for name, shape in shapes.items() if name != added[0]}, draft)

"""The draft's forward: what its rows see and how its keys are computed; and its checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pairs import SMALL, TARGET_LAYERS, draft_config, make_draft, make_target, random_ids

from sglang_dflash.core.draft_config import LayerAttention
from sglang_dflash.reference import DFlashConfig, DFlashDraftModel, FeatureTaps, block_mask, decoder_layers

# The keys, of nine, that the rows of a block of four see after a prefix of five.
FULL_BIDIRECTIONAL = ["xxxxxxxxx", "xxxxxxxxx", "xxxxxxxxx", "xxxxxxxxx"]
FULL_CAUSAL = ["xxxxxx...", "xxxxxxx..", "xxxxxxxx.", "xxxxxxxxx"]
WINDOW_3_CAUSAL = ["...xxx...", "....xxx..", ".....xxx.", "......xxx"]
WINDOW_3_BIDIRECTIONAL = ["...xxxxxx", "....xxxxx", ".....xxxx", "......xxx"]
PREFIX, BLOCK = 5, 4


def _rows(mask: torch.Tensor) -> list[str]:
    """A mask of one request as text."""
    return ["".join("x" if seen else "." for seen in row) for row in mask[0].tolist()]


@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [
        (False, None, FULL_BIDIRECTIONAL),
        (True, None, FULL_CAUSAL),
        (True, 3, WINDOW_3_CAUSAL),
        (False, 3, WINDOW_3_BIDIRECTIONAL),
    ],
)
def test_rows_see(causal, window, expected):
    """Fails where a window is one key too wide or too narrow, or the block's later rows are wrongly hidden or shown."""
    positions = torch.arange(PREFIX, PREFIX + BLOCK)[None]
    assert _rows(block_mask(positions, PREFIX + BLOCK, LayerAttention(causal, window))[0]) == expected


def test_rows_do_not_see_behind_their_request():
    """Fails where a request that is shorter than another one sees keys after its own block."""
    positions = torch.tensor([[5, 6, 7, 8], [2, 3, 4, 5]])
    mask = block_mask(positions, 9, LayerAttention(causal=False, window=None))
    assert _rows(mask[0]) == FULL_BIDIRECTIONAL
    assert _rows(mask[1]) == ["xxxxxx..."] * BLOCK
    sliding = block_mask(positions, 9, LayerAttention(causal=False, window=3))
    assert _rows(sliding[0]) == WINDOW_3_BIDIRECTIONAL
    assert _rows(sliding[1]) == ["xxxxxx...", ".xxxxx...", "..xxxx...", "...xxx..."]


def test_no_mask_where_all_is_seen():
    """Fails where the plain case builds a mask, or another case does not."""
    positions = torch.arange(PREFIX, PREFIX + BLOCK)[None]
    full = LayerAttention(causal=False, window=None)
    assert block_mask(positions, 9, full, ragged=False) is None
    for attention in (full._replace(causal=True), full._replace(window=3)):
        assert block_mask(positions, 9, attention, ragged=False) is not None


def _inputs(seed: int = 3) -> dict[str, torch.Tensor]:
    """One block of four after five tokens of context."""
    generator = torch.Generator().manual_seed(seed)
    hidden = SMALL["hidden_size"]
    return {
        "noise_embedding": torch.randn(1, BLOCK, hidden, generator=generator),
        "target_hidden": torch.randn(1, PREFIX, 2 * hidden, generator=generator),
        "position_ids": torch.arange(PREFIX + BLOCK)[None],
    }


@torch.inference_mode()
def _seen(draft: DFlashDraftModel) -> list[str]:
    """Which keys each row of the draft's output depends on, found by changing them one by one."""
    inputs = _inputs()
    before = draft(**inputs)
    columns = []
    for key in range(PREFIX + BLOCK):
        name, place = ("target_hidden", key) if key < PREFIX else ("noise_embedding", key - PREFIX)
        changed = inputs[name].clone()
        changed[0, place] += 1.0
        columns.append((draft(**{**inputs, name: changed}) != before).any(-1)[0])
    return _rows(torch.stack(columns, dim=1)[None])


SLIDES: dict[str, Any] = {"num_hidden_layers": 1, "use_sliding_window": True, "sliding_window": 3}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({**SLIDES, "max_window_layers": 0}, WINDOW_3_CAUSAL),
        ({**SLIDES, "layer_types": ["sliding_attention"], "is_causal": None}, WINDOW_3_CAUSAL),
        ({**SLIDES, "max_window_layers": 0, "is_causal": True}, WINDOW_3_CAUSAL),
        ({**SLIDES, "max_window_layers": 0, "is_causal": False}, WINDOW_3_BIDIRECTIONAL),
        ({**SLIDES, "use_sliding_window": False}, FULL_BIDIRECTIONAL),
        ({**SLIDES, "max_window_layers": 1, "is_causal": False}, FULL_BIDIRECTIONAL),
        ({**SLIDES, "max_window_layers": 1, "is_causal": True}, FULL_CAUSAL),
        # Each layer passes on what it sees: two windows of three reach five positions.
        (
            {**SLIDES, "num_hidden_layers": 2, "max_window_layers": 0},
            ["...xxx...", "...xxxx..", "...xxxxx.", "....xxxxx"],
        ),
    ],
)
def test_output_depends_on_what_its_rows_see(options, expected):
    """Fails where a layer does not attend as its config says: a key outside the window changes the output, or one
    inside does not."""
    seen = _seen(make_draft(**options))
    for row, (columns, allowed) in enumerate(zip(seen, expected, strict=True)):
        assert columns == allowed, (row, seen)


class _Recorder:
    """A cache that returns its input and records the values that each layer writes."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer_idx == len(self.values)
        self.values.append(values)
        return keys, values


@torch.inference_mode()
def test_context_is_not_input_normed():
    """Fails where a layer's input norm is applied to the context features or not to the block rows, or the fused
    features differ between layers."""
    draft, inputs, recorder = make_draft(), _inputs(), _Recorder()
    draft(**inputs, past_key_values=recorder)
    context = draft.hidden_norm(draft.fc(inputs["target_hidden"]))
    for layer, values in zip(draft.layers, recorder.values, strict=True):
        written = values.transpose(1, 2).flatten(2)  # [1, T + Q, Hkv * D]
        torch.testing.assert_close(written[:, :PREFIX], layer.self_attn.v_proj(context), rtol=1e-5, atol=1e-5)
    first = draft.layers[0]
    block = first.self_attn.v_proj(first.input_layernorm(inputs["noise_embedding"]))
    written = recorder.values[0].transpose(1, 2).flatten(2)
    torch.testing.assert_close(written[:, PREFIX:], block, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.inference_mode()
def test_taps_are_residual_outputs(kind):
    """Fails where a tap is one layer off, is normed, or is not in the given order."""
    target, ids = make_target(kind), random_ids(7, requests=2)
    layers = [2, 0, 1]
    taps = FeatureTaps(target, layers)
    target(ids, output_hidden_states=True)  # transformers adds its own hooks, and leaves them
    hooks = [len(layer._forward_hooks) for layer in decoder_layers(target)]
    with taps:
        output = target(ids, output_hidden_states=True)
        features = taps.take()
    assert torch.equal(features, torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1))
    assert [len(layer._forward_hooks) for layer in decoder_layers(target)] == hooks, "the taps left a hook behind"
    assert len(hooks) == TARGET_LAYERS


@torch.inference_mode()
def test_attention_bias():
    """Fails where one of the four projections ignores its bias."""
    draft = make_draft(attention_bias=True)
    before = draft(**_inputs())
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        bias = getattr(draft.layers[1].self_attn, name).bias
        bias += torch.randn(bias.shape, generator=torch.Generator().manual_seed(4))
        after = draft(**_inputs())
        assert not torch.equal(after, before), name
        before = after


@torch.inference_mode()
def test_rope_base_at_either_place(tmp_path):
    """Fails where the RoPE base of older or newer checkpoints is ignored, and the default is used."""
    make_draft(rope_parameters={"rope_theta": 50.0, "rope_type": "default"}).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    expected = DFlashDraftModel.from_pretrained(tmp_path)(**_inputs())
    del config["rope_parameters"]
    for rope, equal in (({"rope_theta": 50.0, "rope_scaling": None}, True), ({}, False)):
        file.write_text(json.dumps({**config, **rope}))
        assert torch.equal(DFlashDraftModel.from_pretrained(tmp_path)(**_inputs()), expected) == equal


def test_block_size_in_its_section():
    """Fails where a block size that is only in `dflash_config` is not found."""
    config = draft_config().to_dict()
    del config["block_size"]
    config["dflash_config"]["block_size"] = 6
    assert DFlashDraftModel(DFlashConfig(**config)).block_size == 6


@torch.inference_mode()
def test_checkpoint_round_trip(tmp_path):
    """Fails where saving or loading changes a weight, a weight's published name, or a published key of the config."""
    draft = make_draft({"mask_token": "<|MASK|>"}, layer_types=["full_attention", "sliding_attention"],
                       use_sliding_window=True, sliding_window=3, num_target_layers=TARGET_LAYERS)  # fmt: skip
    draft.save_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path).eval()
    weights, weights_again = draft.state_dict(), again.state_dict()
    assert weights.keys() == weights_again.keys()
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    assert torch.equal(draft(**_inputs()), again(**_inputs()))
    assert draft.draft_config == again.draft_config
    norms = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
    projections = {*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))}
    layers = {f"layers.{i}.{name}.weight" for i in range(2) for name in norms | projections}
    assert weights.keys() == layers | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 4, "target_layer_ids": [0, 2], "mask_token": "<|MASK|>"}
    for key in ("block_size", "layer_types", "use_sliding_window", "sliding_window", "num_target_layers", "head_dim"):
        assert config[key] == getattr(draft.config, key), key

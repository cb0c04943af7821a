"""Checkpoints as others publish them: names, shapes and config keys, for targets of two families."""

from __future__ import annotations

import json
import stat
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import GPT2Config, LlamaConfig, Qwen3_5MoeTextConfig, Qwen3Config

from sglang_dflash.core.draft_config import DraftConfig, LayerAttention
from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.serving import TINY_DRAFT
from sglang_dflash.training.layout import new_config, save_draft
from sglang_dflash.training.options import TrainOptions

QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    bos_token_id=151643,
    eos_token_id=151645,
)
LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
)
# Names and shapes of z-lab's Qwen3-8B-DFlash-b16.
LAYER = {
    "input_layernorm.weight": [4096],
    "post_attention_layernorm.weight": [4096],
    "self_attn.q_proj.weight": [4096, 4096],
    "self_attn.k_proj.weight": [1024, 4096],
    "self_attn.v_proj.weight": [1024, 4096],
    "self_attn.o_proj.weight": [4096, 4096],
    "self_attn.q_norm.weight": [128],
    "self_attn.k_norm.weight": [128],
    "mlp.gate_proj.weight": [12288, 4096],
    "mlp.up_proj.weight": [12288, 4096],
    "mlp.down_proj.weight": [4096, 12288],
}
PUBLISHED = {
    "fc.weight": [4096, 5 * 4096],
    "hidden_norm.weight": [4096],
    "norm.weight": [4096],
    **{f"layers.{index}.{name}": shape for index in range(5) for name, shape in LAYER.items()},
}
FULL_SIZE: dict[str, Any] = {"layers": 5, "num_taps": None, "block_size": 16}


def test_names_and_shapes_are_the_published_ones(options):
    """Fails if an engine that loads z-lab's checkpoint would miss a weight of ours, or find an unknown one."""
    with torch.device("meta"):
        draft = DFlashDraftModel(new_config(QWEN3_8B, options(**FULL_SIZE), 151669))
    assert {name: list(weight.shape) for name, weight in draft.state_dict().items()} == PUBLISHED


@pytest.fixture(scope="module")
def saved(tmp_path_factory, draft) -> Any:
    """The embedded draft, written by the trainer."""
    folder = tmp_path_factory.mktemp("saved") / "made" / "anew"
    save_draft(draft, folder)
    return folder


def _weights(folder: Any) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_what_is_written_is_the_embedded_draft(saved):
    """Fails if a name, a shape, the dtype or a bit differs from the embedded checkpoint, which every engine loads."""
    before, after = _weights(TINY_DRAFT), _weights(saved)
    assert before.keys() == after.keys()
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert stat.S_IMODE((saved / "model.safetensors").stat().st_mode) == 0o644


def test_what_is_written_loads(saved, draft):
    """Fails if the trainer's own checkpoint is refused, or read as another draft."""
    loaded = DFlashDraftModel.from_pretrained(saved, dtype=torch.float32)
    assert loaded.draft_config == draft.draft_config
    assert DraftConfig.from_dict(json.loads((saved / "config.json").read_text())) == draft.draft_config
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), draft.parameters(), strict=True))


def test_config_keeps_to_the_embedded_drafts_keys(saved):
    """Fails if a key that readers need is missing, or a key of transformers' own bookkeeping is written."""
    written = json.loads((saved / "config.json").read_text())
    embedded = json.loads((TINY_DRAFT / "config.json").read_text())
    assert {key: written.get(key) for key in embedded} == embedded
    assert not {"_name_or_path", "transformers_version", "auto_map", "torch_dtype"} & written.keys()


def _written(target: Any, made: Any, mask: int, tmp_path: Any) -> dict[str, Any]:
    """config.json of a new draft, saved with weights so small that it takes no time."""
    config = new_config(target, made, mask)
    draft = DFlashDraftModel(new_config(QWEN3_TINY, made, 63))
    draft.config = config
    save_draft(draft, tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


QWEN3_TINY = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=36, num_attention_heads=2, head_dim=16
)


def test_config_for_a_qwen3_target(options, tmp_path):
    """Fails if a key of the published layout is missing, or differs from z-lab's value for this target."""
    written = _written(QWEN3_8B, options(**FULL_SIZE), 151669, tmp_path)
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "num_target_layers": 36,
        "num_hidden_layers": 5,
        "max_window_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "use_sliding_window": False,
        "sliding_window": None,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "tie_word_embeddings": False,
    }
    assert {key: written.get(key) for key in expected} == expected
    assert "is_causal" not in written
    DraftConfig.from_dict(written).check_target(36, 4096, 151936)


def test_config_for_a_llama_target(options, tmp_path):
    """Fails if head_dim is not derived, rope scaling is copied, or the target's norm epsilon or end tokens are lost."""
    written = _written(LLAMA_8B, options(**{**FULL_SIZE, "block_size": 10}), 128255, tmp_path)
    assert (written["head_dim"], written["num_key_value_heads"], written["rms_norm_eps"]) == (128, 8, 1e-5)
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert (written["rope_theta"], written["rope_scaling"]) == (500000.0, None)
    assert written["eos_token_id"] == [128001, 128008, 128009]
    assert written["model_type"] == "qwen3"
    assert DraftConfig.from_dict(written).target_layer_ids == (1, 8, 15, 22, 29)
    assert DraftConfig.from_dict(written).block_size == 10


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 9, 17, 25, 33)),
        ({"layers": 3}, (1, 17, 33)),
        ({"layers": 1}, (18,)),
        ({"layers": 3, "num_taps": 5}, (1, 9, 17, 25, 33)),
        ({"layers": 3, "taps": (2, 30)}, (2, 30)),
    ],
)
def test_taps(changes, expected, options):
    """Fails if the taps are not those of the formula (by default one per layer), or not the given ones."""
    config = new_config(QWEN3_8B, options(**{**FULL_SIZE, **changes}), 151669)
    assert config.draft.target_layer_ids == expected


@pytest.mark.parametrize("taps", [(1, 36), (-2, 4), (40,)])
def test_taps_outside_the_target_are_refused(taps, options):
    """Fails if a tap is a layer that does not exist."""
    with pytest.raises(ValueError, match="target_layer_ids"):
        new_config(QWEN3_8B, options(**{**FULL_SIZE, "taps": taps}), 151669)


def test_a_mask_outside_the_vocabulary_is_refused(options):
    """Fails if the mask token can be outside the embedding table."""
    with pytest.raises(ValueError, match="mask_token_id is 151936"):
        new_config(QWEN3_8B, options(**FULL_SIZE), 151936)


@pytest.mark.parametrize(("is_causal", "sliding", "full"), [(None, True, False), (True, True, True), (False,) * 3])
def test_windows_and_causality(is_causal, sliding, full, options, tmp_path):
    """Fails if readers of config.json get other windows or causality than the options say."""
    made = options(**FULL_SIZE, sliding_window=2048, sliding_layers=4, is_causal=is_causal)
    written = _written(QWEN3_8B, made, 151669, tmp_path)
    assert (written["use_sliding_window"], written["sliding_window"]) == (True, 2048)
    assert written["layer_types"] == ["sliding_attention"] * 4 + ["full_attention"]
    assert written.get("is_causal", None) is is_causal
    read = DraftConfig.from_dict(written).attention
    assert read == (LayerAttention(sliding, 2048),) * 4 + (LayerAttention(full, None),)


def test_a_formula_that_repeats_layers_is_refused():
    """Fails if a draft can read one layer twice: SGLang captures each layer once, so it could not be served."""
    options = TrainOptions(target="t", data=(__file__,), output="o", layers=5)
    small = Qwen3Config(num_hidden_layers=6, hidden_size=64, intermediate_size=64, num_attention_heads=2)
    with pytest.raises(ValueError, match=r"For 5 taps of a target with 6 layers, .* \[1, 2, 2, 2, 3\], .* give fewer"):
        new_config(small, options, 0)


def test_a_mixture_of_experts_without_dense_layers_has_a_draft():
    """Fails if the draft of a target without `intermediate_size` cannot be made, or is as narrow as one expert."""
    options = TrainOptions(target="t", data=(__file__,), output="o", layers=1)
    target = Qwen3_5MoeTextConfig(hidden_size=64, num_hidden_layers=8, moe_intermediate_size=16)
    assert new_config(target, options, 0).intermediate_size == 3 * 64


def test_a_target_without_the_shapes_of_a_draft_is_refused():
    """Fails if a GPT-2-like config gives an AttributeError."""
    options = TrainOptions(target="t", data=(__file__,), output="o", layers=1)
    with pytest.raises(ValueError, match=r"type 'gpt2'. has no intermediate_size"):
        new_config(GPT2Config(), options, 0)

"""The draft configs that are accepted, and those that are refused, with the message that the user gets."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from draft_configs import PUBLISHED, config_of, refusal_of

from sglang_dflash.core.draft_config import DraftConfig, LayerAttention, build_target_layer_ids


def test_published_config_is_read():
    """Fails where a field is taken from the wrong key."""
    assert DraftConfig.from_dict(PUBLISHED) == DraftConfig(
        block_size=16,
        mask_token_id=151669,
        mask_token=None,
        target_layer_ids=(1, 9, 17, 25, 33),
        hidden_size=4096,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        attention=(LayerAttention(causal=False, window=None),) * 5,
        dtype="bfloat16",
    )


def test_reading_leaves_the_config_alone():
    """Fails where a later reader of the same dictionary would see other values."""
    config = config_of()
    DraftConfig.from_dict(config)
    assert config == PUBLISHED


@pytest.mark.parametrize(
    "config",
    [
        config_of(block_size=8),
        config_of(dflash={"block_size": 8}, without=("block_size",)),
        config_of(dflash={"block_size": 8}, block_size=16),
    ],
    ids=["top", "nested", "nested-wins"],
)
def test_block_size_at_either_level(config):
    """Fails where `block_size` is not read at one of the two levels, or top level wins over `dflash_config`."""
    assert DraftConfig.from_dict(config).block_size == 8


@pytest.mark.parametrize("value", [None, 0, -4, 16.0, "16", True])
def test_block_size_must_be_a_positive_integer(value):
    """Fails where such a block size is accepted, or the message lacks the key, the value or the rule."""
    sentence = refusal_of(config_of(block_size=value))
    assert f"block_size={value!r}" in sentence
    assert "positive integer" in sentence


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, 2.5])
def test_sizes_must_be_positive_integers(key, value):
    """Fails where a missing or invalid size is accepted."""
    sentence = refusal_of(config_of(**{key: value}))
    assert f"{key}={value!r}" in sentence
    assert "positive integer" in sentence


@pytest.mark.parametrize("tp_size", [1, 2, 8, 16, 32])
def test_ranks_that_divide_the_draft(tp_size):
    """Fails where a split is refused that the host supports: it copies KV heads if there are fewer than ranks."""
    DraftConfig.from_dict(PUBLISHED).check_ranks(tp_size)


@pytest.mark.parametrize(
    ("change", "tp_size", "key"),
    [
        ({}, 3, "num_attention_heads"),
        ({}, 64, "num_attention_heads"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, 2, "num_key_value_heads"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, 4, "num_key_value_heads"),
        ({"intermediate_size": 12287}, 2, "intermediate_size"),
    ],
)
def test_ranks_that_do_not_divide_the_draft(change, tp_size, key):
    """Fails where such a split is accepted, and an assertion of the host fails later in a child process."""
    with pytest.raises(ValueError, match=f"--tp-size is {tp_size}.*{key}"):
        DraftConfig.from_dict(config_of(**change)).check_ranks(tp_size)


def test_key_value_heads_default_to_heads():
    """Fails where a config without `num_key_value_heads` is refused."""
    assert DraftConfig.from_dict(config_of(without=("num_key_value_heads",))).num_kv_heads == 32


def test_missing_mask_is_refused():
    """Fails where a draft without a mask token is accepted."""
    sentence = refusal_of(config_of(without=("mask_token_id",)))
    assert "no mask" in sentence
    assert "dflash_config.mask_token_id" in sentence


@pytest.mark.parametrize("value", [-1, True, "151669", 3.0])
def test_mask_token_id_must_be_a_token_id(value):
    """Fails where a value that is no token id is accepted; in Python a boolean is an int."""
    sentence = refusal_of(config_of(dflash={"mask_token_id": value}))
    assert f"dflash_config.mask_token_id is {value!r}" in sentence
    assert "token id" in sentence


def test_mask_may_be_named_by_text_or_at_top_level():
    """Fails where a mask given by its text, or by an id at top level, is overlooked."""
    named = DraftConfig.from_dict(config_of(dflash={"mask_token": "<|MASK|>"}, without=("mask_token_id",)))
    assert (named.mask_token_id, named.mask_token) == (None, "<|MASK|>")
    assert DraftConfig.from_dict(config_of(without=("mask_token_id",), mask_token_id=7)).mask_token_id == 7


def test_mask_token_id_zero_is_a_mask():
    """Fails where id 0 counts as no mask."""
    assert DraftConfig.from_dict(config_of(dflash={"mask_token_id": 0})).mask_token_id == 0


@pytest.mark.parametrize("value", [[], "1,9,17", 17, [1, "9"], [1, True], [1, 2.0], {"1": 9}])
def test_target_layer_ids_must_be_layer_numbers(value):
    """Fails where tapped layers that are not a list of integers are accepted."""
    sentence = refusal_of(config_of(dflash={"target_layer_ids": value}))
    assert f"dflash_config.target_layer_ids is {value!r}" in sentence
    assert "list of layer numbers" in sentence


FEATURES = [
    ({"use_gemma_norm": True}, {}, {"gemma_norms": True}),
    ({}, {"attention_value_scale": 0.612}, {"value_scale": 0.612}),
    ({}, {"attention_value_scale": 2}, {"value_scale": 2.0}),
    ({}, {"attention_sink_bias": True}, {"attention_sinks": True}),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, {"quantization": {"quant_method": "fp8"}}),
    ({"quantization_config": {"quant_algo": "FP8"}}, {}, {"quantization": {"quant_algo": "FP8"}}),
]


@pytest.mark.parametrize(("top", "nested", "expected"), FEATURES, ids=str)
def test_features_of_plain_drafts(top, nested, expected):
    """Fails where a feature is not read at the level at which the host reads it."""
    plain, got = DraftConfig.from_dict(PUBLISHED), DraftConfig.from_dict(config_of(nested, **top))
    assert got == replace(plain, **expected) != plain


@pytest.mark.parametrize(
    ("top", "nested"),
    [({"attention_sink_bias": True}, {}), ({"attention_value_scale": 0.5}, {}), ({}, {"use_gemma_norm": True})],
    ids=str,
)
def test_features_at_the_other_level_are_refused(top, nested):
    """Fails where a draft is served without a feature because the host does not read it at that level."""
    key = next(iter(top | nested))
    sentence = refusal_of(config_of(nested, **top))
    assert key in sentence and "SGLang ignores" in sentence and ("dflash_config" if top else "top level") in sentence


@pytest.mark.parametrize("off", [None, False])
def test_features_switched_off_are_plain(off):
    """Fails where a feature that is named only to switch it off is served."""
    nested = {"use_gemma_norm": off, "attention_sink_bias": False}
    config = config_of(nested, use_gemma_norm=off, attention_sink_bias=off)
    assert DraftConfig.from_dict(config) == DraftConfig.from_dict(PUBLISHED)


@pytest.mark.parametrize("key", ["attention_sink_bias", "output_multiplier"])
def test_nulls_that_the_host_does_not_read(key):
    """Fails where a null passes that ends the start in an error of SGLang's."""
    assert f"{key} is None" in refusal_of(config_of({key: None}))


@pytest.mark.parametrize("value", [0, -1.0, "2"], ids=str)
def test_a_factor_of_no_selector_must_be_one_all_the_same(value):
    """Fails where a plain draft's factor passes that the host refuses."""
    assert "output_multiplier is" in refusal_of(config_of({"output_multiplier": value}))


@pytest.mark.parametrize("value", [0, -0.0, float("nan"), float("inf"), True, "0.5"], ids=str)
def test_a_value_scale_must_be_a_number(value):
    """Fails where values would vanish or become NaN."""
    assert f"attention_value_scale is {value!r}" in refusal_of(config_of({"attention_value_scale": value}))


def test_switches_must_be_switches():
    """Fails where a value that is no boolean is taken for its truth value."""
    assert "use_gemma_norm is 'no'" in refusal_of(config_of(use_gemma_norm="no"))
    assert "attention_sink_bias is 1" in refusal_of(config_of({"attention_sink_bias": 1}))


def test_a_quantised_draft_with_its_own_embedding_is_refused():
    """Fails where a draft is given the target's embedding in the place of its own."""
    sentence = refusal_of(config_of(quantization_config={"quant_algo": "W4A16_NVFP4"}, has_embed_tokens=True))
    assert "has_embed_tokens" in sentence and "SGLANG_DFLASH_WORKER=builtin" in sentence
    assert "must be an object" in refusal_of(config_of(quantization_config="fp8"))


@pytest.mark.parametrize("value", [["mask_token_id", 1], "mask", 5])
def test_dflash_config_must_be_an_object(value):
    """Fails where a malformed section raises another error."""
    config = copy.deepcopy(PUBLISHED)
    config["dflash_config"] = value
    sentence = refusal_of(config)
    assert f"dflash_config is {value!r}" in sentence
    assert "object" in sentence


@pytest.mark.parametrize(
    ("num_target_layers", "num_taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (28, 5, (1, 7, 13, 19, 25)),
        (36, 1, (18,)),
        (37, 1, (18,)),
        (36, 2, (1, 33)),
        (6, 2, (1, 3)),
        # 1 + 1 * 3 / 2 = 2.5 and 1 + 1 * 5 / 2 = 3.5: Python rounds half to even.
        (7, 3, (1, 2, 4)),
        (9, 3, (1, 4, 6)),
    ],
)
def test_taps_formula(num_target_layers, num_taps, expected):
    """Fails where a tapped layer is off by one, which nothing shows but a lower acceptance."""
    assert build_target_layer_ids(num_target_layers, num_taps) == expected


QWEN3_8B = {"num_layers": 36, "hidden_size": 4096, "vocab_size": 151936}


def _target_refusal(config: dict[str, Any], **target: int) -> str:
    with pytest.raises(ValueError) as refused:
        DraftConfig.from_dict(config).check_target(**{**QWEN3_8B, **target})
    return str(refused.value)


def test_the_published_target_fits():
    """Fails where the draft's own target is refused, or a smaller one in which the taps and the mask just fit."""
    DraftConfig.from_dict(PUBLISHED).check_target(**QWEN3_8B)
    DraftConfig.from_dict(PUBLISHED).check_target(num_layers=35, hidden_size=4096, vocab_size=151670)


def test_another_hidden_size_is_refused():
    """Fails where a draft is accepted for embeddings of another hidden size."""
    sentence = _target_refusal(PUBLISHED, hidden_size=5120)
    assert "hidden_size is 4096" in sentence and "5120" in sentence
    assert "equal" in sentence


@pytest.mark.parametrize(("layers", "outside"), [([1, 32, 33], [33]), ([-2, 9], [-2]), ([33, 40], [33, 40])])
def test_taps_outside_the_target_are_refused(layers, outside):
    """Fails where a tap is accepted for a missing layer."""
    sentence = _target_refusal(config_of(dflash={"target_layer_ids": layers}), num_layers=33)
    assert f"target_layer_ids has {outside}" in sentence
    assert "0 to 32 of the target's 33" in sentence


def test_a_mask_outside_the_vocabulary_is_refused():
    """Fails where the mask's embedding would be read beyond the embedding table."""
    sentence = _target_refusal(PUBLISHED, vocab_size=151669)
    assert "mask_token_id is 151669" in sentence
    assert "151669 token ids" in sentence


def test_a_mask_without_an_id_is_refused():
    """Fails where a mask that is known only by its text is accepted before its id is known."""
    sentence = _target_refusal(config_of(dflash={"mask_token": "<|MASK|>"}, without=("mask_token_id",)))
    assert "mask_token_id is None" in sentence


@pytest.mark.parametrize("layers", [[1, 1, 3], [17, 9, 1]])
def test_taps_must_rise(layers):
    """Fails where the draft would get features in another order or number than in training: the host captures each
    layer once, in the model's order."""
    sentence = refusal_of(config_of(dflash={"target_layer_ids": layers}))
    assert f"target_layer_ids is {layers}" in sentence and "must rise" in sentence

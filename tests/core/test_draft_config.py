"""The draft configs that are accepted, and those that are refused, with the message that the user gets."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from sglang_dflash.core.draft_config import (
    ARCHITECTURES,
    DSPARK_KEYS,
    SPECIAL_HEADS,
    DraftConfig,
    LayerAttention,
    build_target_layer_ids,
)
from sglang_dflash.core.draft_heads import DFLASH2_ARCHITECTURES, Convolution, Domino, Selector

# As published: z-lab/Qwen3-8B-DFlash-b16.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def _config(dflash: dict[str, Any] | None = None, without: tuple[str, ...] = (), **top: Any) -> dict[str, Any]:
    """The published config with changes; keys in `without` are first removed from both levels."""
    config = copy.deepcopy(PUBLISHED)
    for key in without:
        config.pop(key, None)
        config["dflash_config"].pop(key, None)
    config.update(top)
    config["dflash_config"].update(dflash or {})
    return config


def _refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as refused:
        DraftConfig.from_dict(config)
    sentence = str(refused.value)
    assert sentence.endswith(".") and "\n" not in sentence, sentence
    return sentence


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
        intermediate_size=12288,
        attention=(LayerAttention(causal=False, window=None),) * 5,
    )


def test_reading_leaves_the_config_alone():
    """Fails where a later reader of the same dictionary would see other values."""
    config = _config()
    DraftConfig.from_dict(config)
    assert config == PUBLISHED


@pytest.mark.parametrize(
    "config",
    [
        _config(block_size=8),
        _config(dflash={"block_size": 8}, without=("block_size",)),
        _config(dflash={"block_size": 8}, block_size=16),
    ],
    ids=["top", "nested", "nested-wins"],
)
def test_block_size_at_either_level(config):
    """Fails where `block_size` is not read at one of the two levels, or top level wins over `dflash_config`."""
    assert DraftConfig.from_dict(config).block_size == 8


@pytest.mark.parametrize("value", [None, 0, -4, 16.0, "16", True])
def test_block_size_must_be_a_positive_integer(value):
    """Fails where such a block size is accepted, or the message lacks the key, the value or the rule."""
    sentence = _refusal(_config(block_size=value))
    assert f"block_size={value!r}" in sentence
    assert "positive integer" in sentence


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
@pytest.mark.parametrize("value", [None, 0, 2.5])
def test_sizes_must_be_positive_integers(key, value):
    """Fails where a missing or invalid size is accepted."""
    sentence = _refusal(_config(**{key: value}))
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
        DraftConfig.from_dict(_config(**change)).check_ranks(tp_size)


def test_key_value_heads_default_to_heads():
    """Fails where a config without `num_key_value_heads` is refused."""
    assert DraftConfig.from_dict(_config(without=("num_key_value_heads",))).num_kv_heads == 32


@pytest.mark.parametrize("key", SPECIAL_HEADS)
@pytest.mark.parametrize("nested", [True, False])
def test_special_heads_are_refused(key, nested):
    """Fails where a draft with a special head is served without that head."""
    sentence = _refusal(_config(dflash={key: 64}) if nested else _config(**{key: 64}))
    assert key in sentence
    assert SPECIAL_HEADS[key] in sentence
    way_out = "--speculative-algorithm DSPARK" if key in DSPARK_KEYS else "SGLANG_DFLASH_WORKER=builtin"
    assert way_out in sentence


@pytest.mark.parametrize(
    "config",
    [
        _config(architectures=["Qwen3DSparkModel"]),
        _config(architectures=["DSparkDraftModel"]),
        _config(dflash={"projector_type": "dspark"}),
        _config(projector_type="dspark"),
    ],
)
def test_dspark_is_an_algorithm_of_its_own(config):
    """Fails where a DSpark draft is sent to the built-in DFLASH worker, which does not serve it either."""
    sentence = _refusal(config)
    assert "--speculative-algorithm DSPARK" in sentence and "builtin" not in sentence


@pytest.mark.parametrize("key", SPECIAL_HEADS)
@pytest.mark.parametrize("value", [None, False, 0])
def test_special_heads_switched_off_are_plain(key, value):
    """Fails where a draft that names a special head only to switch it off is refused."""
    assert DraftConfig.from_dict(_config(dflash={key: value})) == DraftConfig.from_dict(PUBLISHED)


def test_lilicorr_is_refused():
    """Fails where LiLiCorr's reranker, whose keys share only a prefix, is overlooked."""
    sentence = _refusal(_config(dflash={"lilicorr_rank": 32}))
    assert "lilicorr_rank" in sentence
    assert "SGLANG_DFLASH_WORKER=builtin" in sentence


@pytest.mark.parametrize(
    "architectures",
    [None, [], "DFlashDraftModel", ["DFlashLagunaForCausalLM"], ["DFlashDraftModel", "Qwen3ForCausalLM"]],
)
def test_other_architectures_are_refused(architectures):
    """Fails where a checkpoint of another class is loaded as a plain draft."""
    sentence = _refusal(_config(architectures=architectures))
    assert f"architectures are {architectures or []}" in sentence
    assert all(architecture in sentence for architecture in ARCHITECTURES)
    assert "SGLANG_DFLASH_WORKER=builtin" in sentence


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def _dflash2(dflash: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """A DFlash2 draft; None drops a key of `dflash_config`."""
    config = _config(dflash={**DFLASH2, **(dflash or {})}, **{"architectures": ["DFlash2DraftModel"], **top})
    config["dflash_config"] = {key: value for key, value in config["dflash_config"].items() if value is not None}
    return config


@pytest.mark.parametrize("architecture", DFLASH2_ARCHITECTURES)
def test_dflash2_is_read(architecture):
    """Fails where the convolutions or the selector are read from the wrong keys, or the rest of the config is not."""
    config = DraftConfig.from_dict(_dflash2(architectures=[architecture]))
    assert config.convolution == Convolution(taps=2, group_size=16)
    assert config.selector == Selector(rank=256, top_k=16, vocab_size=151936, multiplier=1.0, softcap=None)
    assert replace(config, convolution=None, selector=None) == DraftConfig.from_dict(PUBLISHED)


def test_factor_and_cap_of_the_selector_s_logits():
    """Fails where a factor or cap is dropped, or a cap of 0 is not "none"."""
    keys = {"output_multiplier": 0.5, "final_logit_softcapping": 30}
    selector = DraftConfig.from_dict(_dflash2(keys)).selector
    assert (selector.multiplier, selector.softcap) == (0.5, 30.0)
    assert DraftConfig.from_dict(_dflash2({"final_logit_softcapping": 0})).selector.softcap is None


def test_each_part_may_be_absent():
    """Fails where a selector needs convolutions, or a plain draft cannot have them."""
    without = _dflash2({"conv_kernel_size": None, "conv_group_size": None})
    assert DraftConfig.from_dict(without).convolution is None
    plain = DraftConfig.from_dict(_config(dflash={"conv_kernel_size": 2, "conv_group_size": 16}))
    assert (plain.convolution, plain.selector) == (Convolution(2, 16), None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_dflash2({"selector_rank": None, "selector_top_k": None}), ["selector_rank is 0", "positive"]),
        (_dflash2({"selector_top_k": 0}), ["selector_rank is 256", "selector_top_k is 0", "both"]),
        (_dflash2({"conv_group_size": None}), ["conv_kernel_size is 2", "conv_group_size is 0", "both"]),
        (_dflash2({"conv_group_size": 48}), ["conv_group_size is 48", "4096", "divide"]),
        (_dflash2({"selector_rank": -1}), ["selector_rank is -1", "0 or more"]),
        (_dflash2({"conv_kernel_size": "2"}), ["conv_kernel_size is '2'", "integer"]),
        (_dflash2({"selector_top_k": True}), ["selector_top_k is True", "integer"]),
        (_dflash2({"output_multiplier": 0.0}), ["output_multiplier is 0.0", "above 0"]),
        (_dflash2({"final_logit_softcapping": "30"}), ["final_logit_softcapping is '30'", "number"]),
        (_dflash2(vocab_size=8), ["vocab_size=8", "16"]),
        (_dflash2({"selector_rank": None}, selector_rank=256), ["selector_rank", "top level", "dflash_config"]),
        (_config(dflash=DFLASH2), ["selector_rank is 256", "['DFlashDraftModel']", "absent"]),
    ],
)
def test_dflash2_keys_that_do_not_fit(config, words):
    """Fails where such a value is accepted, and the host fails in a traceback or drops a part of the draft."""
    sentence = _refusal(config)
    assert all(word in sentence for word in words), sentence


def test_the_selector_knows_every_token():
    """Fails where a token id of the target has no row in the selector's tables, which are read without a check."""
    draft = DraftConfig.from_dict(_dflash2(vocab_size=151000))
    draft = replace(draft, mask_token_id=0)
    draft.check_target(num_layers=36, hidden_size=4096, vocab_size=151000)
    with pytest.raises(ValueError, match="vocab_size is 151000 and the target's 151936"):
        draft.check_target(num_layers=36, hidden_size=4096, vocab_size=151936)


DOMINO = {
    "projector_type": "domino",
    "gru_hidden_dim": 1024,
    "emb_dim": 256,
    "pure_draft_prefix_len": 1,
    "shift_label": False,
}


@pytest.mark.parametrize("nested", [True, False])
def test_domino_is_read(nested):
    """Fails where a key is read at one level only, or the rest of the config is not read."""
    config = DraftConfig.from_dict(_config(dflash=DOMINO) if nested else _config(**DOMINO))
    assert config.domino == Domino(gru_size=1024, rank=256, vocab_size=151936, shift_label=False)
    assert replace(config, domino=None) == DraftConfig.from_dict(PUBLISHED)
    config.check_target(num_layers=36, hidden_size=4096, vocab_size=151936)
    with pytest.raises(ValueError, match="vocab_size is 151936 and the target's 151940"):
        config.check_target(num_layers=36, hidden_size=4096, vocab_size=151940)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gru_hidden_dim": None}, ["gru_hidden_dim=None", "positive"]),
        ({"emb_dim": 0}, ["emb_dim=0", "positive"]),
        ({"shift_label": "no"}, ["shift_label is 'no'", "true or false"]),
        ({"pure_draft_prefix_len": 2}, ["pure_draft_prefix_len is 2", "must be 1"]),
        ({"projector_type": None}, ["gru_hidden_dim is 1024", "'domino'"]),
        ({"selector_rank": 4, "selector_top_k": 4}, ["selector_rank"]),
    ],
)
def test_domino_keys_that_do_not_fit(change, words):
    """Fails where such a value is accepted, and the host fails in a traceback or drops the projector."""
    sentence = _refusal(_config(dflash={**DOMINO, **change}))
    assert all(word in sentence for word in words), sentence


def test_two_values_of_domino_s_rank():
    """Fails where one of two values is taken silently."""
    assert "emb_dim is 64" in _refusal(_config(dflash=DOMINO, emb_dim=64))


def test_missing_mask_is_refused():
    """Fails where a draft without a mask token is accepted."""
    sentence = _refusal(_config(without=("mask_token_id",)))
    assert "no mask" in sentence
    assert "dflash_config.mask_token_id" in sentence


@pytest.mark.parametrize("value", [-1, True, "151669", 3.0])
def test_mask_token_id_must_be_a_token_id(value):
    """Fails where a value that is no token id is accepted; in Python a boolean is an int."""
    sentence = _refusal(_config(dflash={"mask_token_id": value}))
    assert f"dflash_config.mask_token_id is {value!r}" in sentence
    assert "token id" in sentence


def test_mask_may_be_named_by_text_or_at_top_level():
    """Fails where a mask given by its text, or by an id at top level, is overlooked."""
    named = DraftConfig.from_dict(_config(dflash={"mask_token": "<|MASK|>"}, without=("mask_token_id",)))
    assert (named.mask_token_id, named.mask_token) == (None, "<|MASK|>")
    assert DraftConfig.from_dict(_config(without=("mask_token_id",), mask_token_id=7)).mask_token_id == 7


def test_mask_token_id_zero_is_a_mask():
    """Fails where id 0 counts as no mask."""
    assert DraftConfig.from_dict(_config(dflash={"mask_token_id": 0})).mask_token_id == 0


@pytest.mark.parametrize("value", [[], "1,9,17", 17, [1, "9"], [1, True], [1, 2.0], {"1": 9}])
def test_target_layer_ids_must_be_layer_numbers(value):
    """Fails where tapped layers that are not a list of integers are accepted."""
    sentence = _refusal(_config(dflash={"target_layer_ids": value}))
    assert f"dflash_config.target_layer_ids is {value!r}" in sentence
    assert "list of layer numbers" in sentence


def test_taps_without_layer_ids_follow_the_formula():
    """Fails where a checkpoint without `target_layer_ids` gets other layers than it was trained with."""
    config = _config(without=("target_layer_ids",), num_target_layers=64)
    assert DraftConfig.from_dict(config).target_layer_ids == (1, 16, 31, 46, 61)


def test_taps_need_the_number_of_target_layers():
    """Fails where the formula is used without `num_target_layers`."""
    sentence = _refusal(_config(without=("target_layer_ids", "num_target_layers")))
    assert "num_target_layers=None" in sentence


@pytest.mark.parametrize(
    "layer_types",
    [["full_attention"] * 4, ["full_attention"] * 4 + ["chunked_attention"], "full_attention", []],
    ids=["too-few", "unknown", "text", "empty"],
)
def test_layer_types_must_describe_every_layer(layer_types):
    """Fails where an unknown type of layer, or too few layers, count as full attention."""
    sentence = _refusal(_config(layer_types=layer_types))
    assert f"layer_types is {layer_types}" in sentence
    assert "5 entries" in sentence
    assert "'full_attention' or 'sliding_attention'" in sentence


@pytest.mark.parametrize("layer_types", [5, [["full_attention"]] * 5], ids=["number", "nested"])
def test_layer_types_of_another_type_are_refused_in_a_sentence(layer_types):
    """Fails where a malformed value raises TypeError, for which the caller prints no message."""
    assert "layer_types" in _refusal(_config(layer_types=layer_types))


SLIDING, FULL = "sliding_attention", "full_attention"


def _sliding(layer_types: list[str] | None, without: tuple[str, ...] = (), **top: Any) -> dict[str, Any]:
    """The published config with windows of 2048 switched on."""
    window = {"use_sliding_window": True, "sliding_window": 2048}
    return _config(without=without, **{**window, "layer_types": layer_types, **top})


def test_absent_layer_types_mean_full_attention():
    """Fails where an older checkpoint without this key is refused, or gets a window that its config switches off."""
    config = _config(without=("layer_types",), sliding_window=2048, max_window_layers=0)
    assert DraftConfig.from_dict(config) == DraftConfig.from_dict(PUBLISHED)


@pytest.mark.parametrize(
    ("without", "max_window_layers", "sliding"),
    [((), 3, 2), ((), 0, 5), ((), 5, 0), ((), 9, 0), (("max_window_layers",), None, 0)],
)
def test_absent_layer_types_are_derived_as_the_host_does(without, max_window_layers, sliding):
    """Fails where a layer from `max_window_layers` on (default 28) counts as full: the host gives it a window."""
    top = {} if max_window_layers is None else {"max_window_layers": max_window_layers}
    config = _sliding(None, without=("layer_types", *without), **top)
    full_layers = (LayerAttention(causal=False, window=None),) * (5 - sliding)
    sliding_layers = (LayerAttention(causal=True, window=2048),) * sliding
    assert DraftConfig.from_dict(config).attention == full_layers + sliding_layers


@pytest.mark.parametrize("first", [None, -1, "3", 2.0])
def test_first_sliding_layer_must_be_a_number(first):
    """Fails where such a value raises another error, or is taken for a layer number."""
    sentence = _refusal(_sliding(None, without=("layer_types",), max_window_layers=first))
    assert f"max_window_layers is {first!r}" in sentence


def test_derived_sliding_layers_need_a_window():
    """Fails where layers that would get the host's default window count as full."""
    config = _config(without=("layer_types", "sliding_window"), use_sliding_window=True, max_window_layers=0)
    assert "sliding_window=None" in _refusal(config)


@pytest.mark.parametrize("window", [None, 0, -1, "2048"])
def test_sliding_layers_need_a_window(window):
    """Fails where a sliding layer without a window is accepted and runs with full attention."""
    sentence = _refusal(_sliding([SLIDING] * 4 + [FULL], sliding_window=window))
    assert f"sliding_window={window!r}" in sentence
    assert "positive integer" in sentence


@pytest.mark.parametrize("without", [(), ("use_sliding_window",)], ids=["false", "absent"])
def test_sliding_layers_need_the_switch(without):
    """Fails where a window is accepted that the host drops, because `use_sliding_window` is off."""
    sentence = _refusal(_config(layer_types=[SLIDING] * 4 + [FULL], sliding_window=2048, without=without))
    assert "use_sliding_window is False" in sentence
    assert "must be true" in sentence


@pytest.mark.parametrize(
    ("is_causal", "sliding_causal", "full_causal"),
    [(None, True, False), (True, True, True), (False, False, False)],
)
def test_causality_and_windows_of_layers(is_causal, sliding_causal, full_causal):
    """Fails where `is_causal` does not hold for every layer, where a full layer gets the window, or where, without
    `is_causal`, a sliding layer is not causal or a full one is."""
    config = _sliding([SLIDING] * 4 + [FULL], is_causal=is_causal)
    sliding, full = LayerAttention(sliding_causal, 2048), LayerAttention(full_causal, None)
    assert DraftConfig.from_dict(config).attention == (sliding,) * 4 + (full,)


@pytest.mark.parametrize("nested", [True, False])
def test_causality_at_either_level(nested):
    """Fails where `is_causal` is not read at one of the two levels."""
    config = _config(dflash={"is_causal": True}) if nested else _config(is_causal=True)
    assert DraftConfig.from_dict(config).attention == (LayerAttention(causal=True, window=None),) * 5


@pytest.mark.parametrize("value", ["false", 1, 0.0, [True], {}])
def test_causality_of_another_type_is_refused(value):
    """Fails where a value that is no boolean is accepted for its truth value."""
    sentence = _refusal(_config(is_causal=value))
    assert f"is_causal is {value!r}" in sentence
    assert "true, false or absent" in sentence


FEATURES = [
    ({"use_gemma_norm": True}, {}, {"gemma_norms": True}),
    ({}, {"attention_value_scale": 0.612}, {"value_scale": 0.612}),
    ({}, {"attention_value_scale": 2}, {"value_scale": 2.0}),
    ({}, {"attention_sink_bias": True}, {"attention_sinks": True}),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, {"quantization": "fp8"}),
    ({"quantization_config": {"quant_algo": "FP8"}}, {}, {"quantization": "FP8"}),
]


@pytest.mark.parametrize(("top", "nested", "expected"), FEATURES, ids=str)
def test_features_of_plain_drafts(top, nested, expected):
    """Fails where a feature is not read at the level at which the host reads it."""
    plain, got = DraftConfig.from_dict(PUBLISHED), DraftConfig.from_dict(_config(nested, **top))
    assert got == replace(plain, **expected) != plain


@pytest.mark.parametrize(
    ("top", "nested"),
    [({"attention_sink_bias": True}, {}), ({"attention_value_scale": 0.5}, {}), ({}, {"use_gemma_norm": True})],
    ids=str,
)
def test_features_at_the_other_level_are_refused(top, nested):
    """Fails where a draft is served without a feature because the host does not read it at that level."""
    key = next(iter(top | nested))
    sentence = _refusal(_config(nested, **top))
    assert key in sentence and "host ignores" in sentence and ("dflash_config" if top else "top level") in sentence


@pytest.mark.parametrize("off", [None, False])
def test_features_switched_off_are_plain(off):
    """Fails where a feature that is named only to switch it off is served."""
    config = _config({"attention_sink_bias": off, "use_gemma_norm": off}, use_gemma_norm=off, attention_sink_bias=off)
    assert DraftConfig.from_dict(config) == DraftConfig.from_dict(PUBLISHED)


@pytest.mark.parametrize("value", [0, -0.0, float("nan"), float("inf"), True, "0.5"], ids=str)
def test_a_value_scale_must_be_a_number(value):
    """Fails where values would vanish or become NaN."""
    assert f"attention_value_scale is {value!r}" in _refusal(_config({"attention_value_scale": value}))


def test_switches_must_be_switches():
    """Fails where a value that is no boolean is taken for its truth value."""
    assert "use_gemma_norm is 'no'" in _refusal(_config(use_gemma_norm="no"))
    assert "attention_sink_bias is 1" in _refusal(_config({"attention_sink_bias": 1}))


def test_a_quantised_draft_with_its_own_embedding_is_refused():
    """Fails where a draft is given the target's embedding in the place of its own."""
    sentence = _refusal(_config(quantization_config={"quant_algo": "W4A16_NVFP4"}, has_embed_tokens=True))
    assert "has_embed_tokens" in sentence and "SGLANG_DFLASH_WORKER=builtin" in sentence
    assert "must be an object" in _refusal(_config(quantization_config="fp8"))


@pytest.mark.parametrize("value", [["mask_token_id", 1], "mask", 5])
def test_dflash_config_must_be_an_object(value):
    """Fails where a malformed section raises another error."""
    config = copy.deepcopy(PUBLISHED)
    config["dflash_config"] = value
    sentence = _refusal(config)
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


@pytest.mark.parametrize(("layers", "outside"), [([1, 32, 33], [33]), ([-1, 9], [-1]), ([33, 40], [33, 40])])
def test_taps_outside_the_target_are_refused(layers, outside):
    """Fails where a tap is accepted for a missing layer."""
    sentence = _target_refusal(_config(dflash={"target_layer_ids": layers}), num_layers=33)
    assert f"target_layer_ids has {outside}" in sentence
    assert "0 to 32 of the target's 33" in sentence


def test_a_mask_outside_the_vocabulary_is_refused():
    """Fails where the mask's embedding would be read beyond the embedding table."""
    sentence = _target_refusal(PUBLISHED, vocab_size=151669)
    assert "mask_token_id is 151669" in sentence
    assert "151669 token ids" in sentence


def test_a_mask_without_an_id_is_refused():
    """Fails where a mask that is known only by its text is accepted before its id is known."""
    sentence = _target_refusal(_config(dflash={"mask_token": "<|MASK|>"}, without=("mask_token_id",)))
    assert "mask_token_id is None" in sentence


@pytest.mark.parametrize("layers", [[1, 1, 3], [17, 9, 1]])
def test_taps_must_rise(layers):
    """Fails where the draft would get features in another order or number than in training: the host captures each
    layer once, in the model's order."""
    sentence = _refusal(_config(dflash={"target_layer_ids": layers}))
    assert f"target_layer_ids is {layers}" in sentence and "must rise" in sentence


def test_taps_of_the_formula_must_rise():
    """Fails where the formula names a layer twice, because the target has too few layers, and this is accepted."""
    assert "must rise" in _refusal(_config(without=("target_layer_ids",), num_target_layers=6))

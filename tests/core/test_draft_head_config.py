"""Draft configs with other heads: DFlash2, Domino, and those that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from draft_configs import PUBLISHED, config_of, refusal_of

from sglang_dflash.core.draft_config import ARCHITECTURES, DSPARK_KEYS, SPECIAL_HEADS, DraftConfig
from sglang_dflash.core.draft_heads import DFLASH2_ARCHITECTURES, Convolution, Domino, Selector


@pytest.mark.parametrize("key", SPECIAL_HEADS)
@pytest.mark.parametrize("nested", [True, False])
def test_special_heads_are_refused(key, nested):
    """Fails where a draft with a special head is served without that head."""
    sentence = refusal_of(config_of(dflash={key: 64}) if nested else config_of(**{key: 64}))
    assert key in sentence
    assert SPECIAL_HEADS[key] in sentence
    way_out = "--speculative-algorithm DSPARK" if key in DSPARK_KEYS else "SGLANG_DFLASH_WORKER=builtin"
    assert way_out in sentence


@pytest.mark.parametrize(
    "config",
    [
        config_of(architectures=["Qwen3DSparkModel"]),
        config_of(architectures=["DSparkDraftModel"]),
        config_of(dflash={"projector_type": "dspark"}),
        config_of(projector_type="dspark"),
    ],
)
def test_dspark_is_an_algorithm_of_its_own(config):
    """Fails where a DSpark draft is sent to the built-in DFLASH worker, which does not serve it either."""
    sentence = refusal_of(config)
    assert "--speculative-algorithm DSPARK" in sentence and "builtin" not in sentence


@pytest.mark.parametrize("key", SPECIAL_HEADS)
@pytest.mark.parametrize("value", [None, False, 0])
def test_special_heads_switched_off_are_plain(key, value):
    """Fails where a draft that names a special head only to switch it off is refused."""
    assert DraftConfig.from_dict(config_of(dflash={key: value})) == DraftConfig.from_dict(PUBLISHED)


def test_lilicorr_is_refused():
    """Fails where LiLiCorr's reranker, whose keys share only a prefix, is overlooked."""
    sentence = refusal_of(config_of(dflash={"lilicorr_rank": 32}))
    assert "lilicorr_rank" in sentence
    assert "SGLANG_DFLASH_WORKER=builtin" in sentence


@pytest.mark.parametrize(
    "architectures",
    [None, [], "DFlashDraftModel", ["DFlashLagunaForCausalLM"], ["DFlashDraftModel", "Qwen3ForCausalLM"]],
)
def test_other_architectures_are_refused(architectures):
    """Fails where a checkpoint of another class is loaded as a plain draft."""
    sentence = refusal_of(config_of(architectures=architectures))
    assert f"architectures are {architectures or []}" in sentence
    assert all(architecture in sentence for architecture in ARCHITECTURES)
    assert "SGLANG_DFLASH_WORKER=builtin" in sentence


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def _dflash2(dflash: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """A DFlash2 draft; None drops a key of `dflash_config`."""
    config = config_of(dflash={**DFLASH2, **(dflash or {})}, **{"architectures": ["DFlash2DraftModel"], **top})
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
    plain = DraftConfig.from_dict(config_of(dflash={"conv_kernel_size": 2, "conv_group_size": 16}))
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
        (config_of(dflash=DFLASH2), ["selector_rank is 256", "['DFlashDraftModel']", "absent"]),
    ],
)
def test_dflash2_keys_that_do_not_fit(config, words):
    """Fails where such a value is accepted, and the host fails in a traceback or drops a part of the draft."""
    sentence = refusal_of(config)
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
    config = DraftConfig.from_dict(config_of(dflash=DOMINO) if nested else config_of(**DOMINO))
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
    sentence = refusal_of(config_of(dflash={**DOMINO, **change}))
    assert all(word in sentence for word in words), sentence


def test_two_values_of_domino_s_rank():
    """Fails where one of two values is taken silently."""
    assert "emb_dim is 64" in refusal_of(config_of(dflash=DOMINO, emb_dim=64))

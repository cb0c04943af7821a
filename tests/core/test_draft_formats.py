"""Every published layout is read as what its trainer meant, and what we do not know ends the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draft_configs import PUBLISHED, config_of, refusal_of

from published_layouts import LAYOUTS, NEVER_DRAFTED, SAME_STEPS, publish
from sglang_dflash.core.draft_config import DraftConfig, LayerAttention
from sglang_dflash.core.draft_folder import plain_folder, plain_name, read_own_head
from sglang_dflash.core.draft_formats import read_published
from sglang_dflash.serving import TINY_DRAFT

PLAIN = json.loads((TINY_DRAFT / "config.json").read_text())
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(layout: str, folder: Path) -> DraftConfig:
    return DraftConfig.from_dict(json.loads((publish(layout, folder) / "config.json").read_text()))


@pytest.mark.parametrize("layout", SAME_STEPS)
def test_layouts_mean_the_same_draft(layout, tmp_path):
    """Fails where a tap is off by one, a nested key is not read, or a copied embedding changes what is drafted."""
    plain, got = DraftConfig.from_dict(PLAIN), read(layout, tmp_path / "draft")
    for name in (
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "hidden_size",
        "num_layers",
        "head_dim",
        "most_rows",
    ):
        assert getattr(got, name) == getattr(plain, name), name
    assert [one.causal for one in got.attention] == [False, False]
    assert got.layout in layout or got.layout == "speculators"


def test_deepspec_is_anchor_first(tmp_path):
    """Fails where 7 rows give 6 drafts, or what the target alone means stays in the config."""
    draft = read("DeepSpec", tmp_path / "draft")
    assert (draft.anchor_first, draft.block_size, draft.most_rows) == (True, 8, 9)
    folder = plain_folder(tmp_path / "draft")
    assert "partial_rotary_factor" not in json.loads((folder / "config.json").read_text())


def speculators(**changes: Any) -> dict[str, Any]:
    inner = {
        key: value for key, value in PUBLISHED.items() if key not in ("architectures", "dflash_config", "block_size")
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 8,
        "mask_token_id": 151669,
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        **changes,
    }


def test_old_speculators_configs_have_llamas_defaults():
    """Fails where a head's size, the rope's base or causality comes from Qwen3's defaults, or from another layout."""
    inner = {key: value for key, value in speculators()["transformer_layer_config"].items() if key != "head_dim"}
    config = DraftConfig.from_dict(speculators(transformer_layer_config=inner | {"model_type": "llama"}))
    assert (config.head_dim, config.target_layer_ids) == (128, (1, 9, 17, 25, 33))
    windows = inner | {"layer_types": [SLIDING] * 4 + [FULL], "sliding_window": 2048}
    causal = DraftConfig.from_dict(speculators(transformer_layer_config=windows)).attention
    assert causal == (LayerAttention(True, 2048),) * 4 + (LayerAttention(False, None),)
    whole = speculators(transformer_layer_config=windows, sliding_window_non_causal=True)
    assert DraftConfig.from_dict(whole).attention[0] == LayerAttention(False, 2048)
    tap = DraftConfig.from_dict(speculators(aux_hidden_state_layer_ids=[0, 36]))
    assert tap.target_layer_ids == (-1, 35)
    first = DraftConfig.from_dict(speculators(sample_from_anchor=True, draft_vocab_size=32000))
    assert (first.most_rows, first.head_vocab_size) == (9, 32000)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "dspark"}, "speculators_model_type is 'dspark'"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
        ({"target_hidden_size": 16384}, "target_hidden_size is 16384"),
        ({"layer_types": [SLIDING] * 5}, "layer_types is ['sliding_attention"),
        ({"draft_vocab_size": -3}, "draft_vocab_size=-3"),
    ],
)
def test_speculators_refusals(changes, said):
    """Fails where a draft that we would misread is served."""
    assert said in refusal_of(speculators(**changes))


CAUSAL = (LayerAttention(True, None),) * 5


@pytest.mark.parametrize("key", ["causal", "causal_head", "is_causal"])
def test_spellings_of_causality(key):
    """Fails where a draft that was trained causally is served with the other mask."""
    assert DraftConfig.from_dict(config_of(dflash={key: True})).attention == CAUSAL
    assert DraftConfig.from_dict(config_of(dflash={key: True}, is_causal=True)).attention == CAUSAL
    assert "they must agree" in refusal_of(config_of(dflash={key: True}, is_causal=False))
    assert "true, false or absent" in refusal_of(config_of(dflash={key: "yes"}))


def test_nemos_jetspec_was_trained_causally():
    """Fails where the `is_causal` that its trainer leaves behind wins."""
    config = config_of(dflash={"causal": True}, architectures=["Qwen3DFlashDraftModel"], is_causal=False)
    assert DraftConfig.from_dict(config).attention == CAUSAL


def test_windows_of_all_layers():
    """Fails where `use_swa` is dropped, or drops the causality that goes with it."""
    config = config_of(dflash={"use_swa": True, "swa_window_size": 1024})
    assert DraftConfig.from_dict(config).attention == (LayerAttention(False, 1024),) * 5
    causal = config_of(dflash={"use_swa": True, "causal": True}, sliding_window=512)
    assert DraftConfig.from_dict(causal).attention == (LayerAttention(True, 512),) * 5
    assert DraftConfig.from_dict(config_of(dflash={"use_swa": False, "swa_window_size": 9})).attention[0].window is None
    for changes in ({"sliding_window": 2048}, {"layer_types": [SLIDING] + [FULL] * 4, "use_sliding_window": True}):
        assert "must agree" in refusal_of(config_of(dflash={"use_swa": True, "swa_window_size": 1024}, **changes))


@pytest.mark.parametrize("key", ["causl", "block_sizes", "tree_width", "target_layers"])
def test_unknown_keys_end_the_start(key):
    """Fails where a key that changes the draft is ignored."""
    sentence = refusal_of(config_of(dflash={key: 3}))
    assert f"{key}=3" in sentence and "target_layer_ids" in sentence and "copy of config.json" in sentence
    DraftConfig.from_dict(config_of(dflash={key: None}))
    DraftConfig.from_dict(config_of(**{key: 3}))


def test_inert_keys():
    """Fails where a published draft is refused for a key of its training, or one that changes serving passes."""
    inert = {"num_anchors": 512, "loss_decay_gamma": 7.0, "input_embedding_scale": 1.0, "target_hidden_size": 4096}
    DraftConfig.from_dict(config_of(dflash=inert | {"num_hidden_layers": 5}))
    assert "input_embedding_scale=2.0" in refusal_of(config_of(dflash={"input_embedding_scale": 2.0}))
    assert "num_hidden_layers" in refusal_of(config_of(dflash={"num_hidden_layers": 4}))


def test_taps_are_not_guessed():
    """Fails where a draft without `target_layer_ids` starts with taps that it was not trained with."""
    assert "target_layer_ids is None" in refusal_of(config_of(without=("target_layer_ids",)))


def test_sinks_at_both_levels():
    """Fails where ModelOpt's second `attention_sink_bias` ends the start, or one that disagrees is ignored."""
    assert DraftConfig.from_dict(
        config_of(dflash={"attention_sink_bias": True}, attention_sink_bias=True)
    ).attention_sinks
    assert "attention_sink_bias" in refusal_of(
        config_of(dflash={"attention_sink_bias": False}, attention_sink_bias=True)
    )


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_plain_folders(layout, tmp_path):
    """Fails where the plain folder means another draft, lacks a file, or is made anew at each start."""
    folder = publish(layout, tmp_path / "draft")
    plain = plain_folder(folder)
    assert plain == plain_folder(folder) == Path(plain_name(str(folder)))
    assert plain_folder(plain) == plain, "what is plain is left alone"
    assert {file.name for file in plain.iterdir()} == {file.name for file in folder.iterdir()}
    published, written = (json.loads((one / "config.json").read_text()) for one in (folder, plain))
    read, again = DraftConfig.from_dict(published), DraftConfig.from_dict(written)
    assert all(getattr(read, name) == getattr(again, name) for name in read.__slots__ if name != "layout")


def test_plain_drafts_stay_where_they_are(tmp_path):
    """Fails where a plain draft is copied, or a folder without a config ends in a traceback."""
    assert plain_folder(TINY_DRAFT) == TINY_DRAFT
    assert plain_name(str(TINY_DRAFT)) == str(TINY_DRAFT)
    assert plain_name(str(tmp_path)) == str(tmp_path)


def test_own_head(tmp_path):
    """Fails where a row stands for another id than i + d2t[i], or a head of another size is taken."""
    folder = publish("speculators", tmp_path / "draft")
    kept = [one for one in range(PLAIN["vocab_size"]) if one not in NEVER_DRAFTED]
    head = read_own_head(folder, len(kept))
    assert head.ids.tolist() == kept and len(head.weight) == len(kept)
    with pytest.raises(ValueError, match="draft_vocab_size is 32"):
        read_own_head(folder, 32)


def test_what_the_target_alone_means_leaves():
    """Fails where a key that a trainer copied from the target turns a part of the draft's head, or a wrong number of
    target layers ends the start."""
    leaked = {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 1e6, "mrope_section": [8, 12, 12]}}
    nemo = read_published(config_of(architectures=["Qwen3DFlashDraftModel"], **leaked)).config
    assert "partial_rotary_factor" not in nemo and nemo["rope_parameters"] == {"rope_theta": 1e6}
    assert "num_target_layers" not in read_published(config_of(num_target_layers=28)).config
    assert read_published(PUBLISHED).config == PUBLISHED


def test_gemma_drafts_of_speculators_are_refused():
    """Fails where a draft that reads the embedding unscaled is served with a scaled one."""
    verifier = {"algorithm": "dflash", "verifier": {"name_or_path": "google/gemma-4-31B-it"}}
    assert "Gemma" in refusal_of(speculators(speculators_config=verifier))

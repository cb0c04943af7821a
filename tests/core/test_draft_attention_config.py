"""Draft configs: which layers slide, and which keys a block row sees."""

from __future__ import annotations

from typing import Any

import pytest
from draft_configs import PUBLISHED, config_of, refusal_of

from sglang_dflash.core.draft_config import DraftConfig, LayerAttention


@pytest.mark.parametrize(
    "layer_types",
    [["full_attention"] * 4, ["full_attention"] * 4 + ["chunked_attention"], "full_attention", []],
    ids=["too-few", "unknown", "text", "empty"],
)
def test_layer_types_must_describe_every_layer(layer_types):
    """Fails where an unknown type of layer, or too few layers, count as full attention."""
    sentence = refusal_of(config_of(layer_types=layer_types))
    assert f"layer_types is {layer_types}" in sentence
    assert "5 entries" in sentence
    assert "'full_attention' or 'sliding_attention'" in sentence


@pytest.mark.parametrize("layer_types", [5, [["full_attention"]] * 5], ids=["number", "nested"])
def test_layer_types_of_another_type_are_refused_in_a_sentence(layer_types):
    """Fails where a malformed value raises TypeError, for which the caller prints no message."""
    assert "layer_types" in refusal_of(config_of(layer_types=layer_types))


SLIDING, FULL = "sliding_attention", "full_attention"


def _sliding(layer_types: list[str] | None, without: tuple[str, ...] = (), **top: Any) -> dict[str, Any]:
    """The published config with windows of 2048 switched on."""
    window = {"use_sliding_window": True, "sliding_window": 2048}
    return config_of(without=without, **{**window, "layer_types": layer_types, **top})


def test_absent_layer_types_mean_full_attention():
    """Fails where an older checkpoint without this key is refused, or gets a window that its config switches off."""
    config = config_of(without=("layer_types",), sliding_window=2048, max_window_layers=0)
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
    sentence = refusal_of(_sliding(None, without=("layer_types",), max_window_layers=first))
    assert f"max_window_layers is {first!r}" in sentence


def test_derived_sliding_layers_need_a_window():
    """Fails where layers that would get the host's default window count as full."""
    config = config_of(without=("layer_types", "sliding_window"), use_sliding_window=True, max_window_layers=0)
    assert "sliding_window=None" in refusal_of(config)


@pytest.mark.parametrize("window", [None, 0, -1, "2048"])
def test_sliding_layers_need_a_window(window):
    """Fails where a sliding layer without a window is accepted and runs with full attention."""
    sentence = refusal_of(_sliding([SLIDING] * 4 + [FULL], sliding_window=window))
    assert f"sliding_window={window!r}" in sentence
    assert "positive integer" in sentence


@pytest.mark.parametrize("without", [(), ("use_sliding_window",)], ids=["false", "absent"])
def test_sliding_layers_need_the_switch(without):
    """Fails where a window is accepted that the host drops, because `use_sliding_window` is off."""
    sentence = refusal_of(config_of(layer_types=[SLIDING] * 4 + [FULL], sliding_window=2048, without=without))
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
    config = config_of(dflash={"is_causal": True}) if nested else config_of(is_causal=True)
    assert DraftConfig.from_dict(config).attention == (LayerAttention(causal=True, window=None),) * 5


@pytest.mark.parametrize("value", ["false", 1, 0.0, [True], {}])
def test_causality_of_another_type_is_refused(value):
    """Fails where a value that is no boolean is accepted for its truth value."""
    sentence = refusal_of(config_of(is_causal=value))
    assert f"is_causal is {value!r}" in sentence
    assert "true, false or absent" in sentence

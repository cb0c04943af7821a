"""What --json-model-override-args says of a draft is served as it is said, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from published_layouts import publish
from sglang_dflash.core.draft_config import LayerAttention
from sglang_dflash.host.start.draft_files import read_draft_config
from sglang_dflash.serving import TINY_DRAFT

DFLASH = json.loads((TINY_DRAFT / "config.json").read_text())["dflash_config"]


def arguments(draft: Path, overrides: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_draft_model_path=str(draft),
        speculative_draft_model_revision=None,
        json_model_override_args=json.dumps(overrides),
    )


@pytest.mark.parametrize("layout", ["z-lab, nested", "speculators"])
def test_plain_keys_hold_for_the_draft_too(layout: str, tmp_path: Path) -> None:
    """Fails where an override that SGLang joins to the draft's config is not seen, or one for the target is refused."""
    draft = publish(layout, tmp_path / "draft")
    window = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 24}
    read = read_draft_config(arguments(draft, window | {"is_causal": False}))
    assert read.attention == (LayerAttention(causal=False, window=24),) * 2 and read.layout in layout
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}}
    assert read_draft_config(arguments(draft, yarn)) == read_draft_config(arguments(draft, {}))


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("z-lab, nested", {"dflash_config": {"causal": True}}),
        ("z-lab, nested", {"dflash_config": DFLASH | {"causal": True}}),
        ("z-lab, nested", {"dflash_config": DFLASH | {"use_swa": True, "swa_window_size": 24}}),
        ("speculators", {"aux_hidden_state_layer_ids": [1, 2, 3]}),
        ("speculators", {"transformer_layer_config": {"sliding_window": 24}}),
    ],
)
def test_keys_of_other_layouts_are_refused(layout: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Fails where we read a key that SGLang's model of the draft does not, or nobody reads it and nobody says so."""
    with pytest.raises(ValueError, match="--json-model-override-args is ") as refused:
        read_draft_config(arguments(publish(layout, tmp_path / "draft"), overrides))
    said = str(refused.value)
    assert json.dumps(overrides) in said and "allowed: the top-level keys" in said and "\n" not in said

"""The config that comes with a MiMo-V2 checkpoint: flat, as SGLang reads it. transformers' own nests rotary parameters
by kind of layer, which SGLang cannot read."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class MiMoV2FlashConfig(PretrainedConfig):
    model_type = "mimo_v2_flash"

    def __init__(self, rope_parameters: Any = None, **flat: Any) -> None:
        super().__init__(**flat)
        self.rope_parameters = {"rope_type": "default", "rope_theta": flat.get("rope_theta")}

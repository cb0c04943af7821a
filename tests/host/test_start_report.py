"""What is said of server flags before a server is started."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.host.start import start_report


def config(**values: Any) -> SimpleNamespace:
    """A model's config as SGLang has it."""
    shape = {
        "dtype": torch.bfloat16,
        "head_dim": 64,
        "v_head_dim": 64,
        "get_num_kv_heads": lambda tp_size: 8 // tp_size,
    }
    return SimpleNamespace(**{**shape, **values})


@pytest.mark.parametrize(
    ("values", "tp_size", "cache_dtype", "expected"),
    [
        ({}, 1, "auto", 3 * 8 * 128 * 2),
        ({}, 2, "auto", 3 * 4 * 128 * 2),
        ({"dtype": torch.float32}, 1, "auto", 3 * 8 * 128 * 4),
        ({"dtype": torch.float32}, 1, "bfloat16", 3 * 8 * 128 * 2),
        ({}, 1, "fp8_e4m3", 3 * 8 * 128),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 4, "auto", 3 * 576 * 2),
    ],
)
def test_bytes_of_a_token(values, tp_size, cache_dtype, expected):
    """Fails where ranks, dtype, or the one latent row of MLA are left out."""
    assert start_report.token_bytes(config(**values), 3, tp_size, cache_dtype) == expected


def test_a_line_is_json_behind_its_mark(capsys):
    """Fails where the parent would not find the line, or could not read it."""
    start_report.say("settings", block_size=8, dtype="float32")
    line = capsys.readouterr().out
    assert line.startswith(start_report.MARK)
    assert json.loads(line) == {"start": "settings", "block_size": 8, "dtype": "float32"}

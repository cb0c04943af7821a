"""Experts on two ranks (`--ep-size 2`): tokens are those of speculation off in the same layout."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from family_settings import ARMS, POOL, target_flags
from models import make_draft, make_target

from equality import ask_off, assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT

pytestmark = pytest.mark.server
LAYOUT = ["--tp-size", "2", "--ep-size", "2"]
NEW_TOKENS = 48
FAMILY = "Qwen3 MoE"
LENGTHS = (1, 17, 33, 64, 65, 90, 130, 700)  # the last is long enough for SGLang's loop over experts, not our op


def test_experts_on_ranks(tmp_path: Path) -> None:
    """Fails where a rank runs experts that it does not have, the ranks' sums are not added, or ranks disagree about
    rows. Drafts are replayed."""
    target = make_target(FAMILY, tmp_path / "target")
    draft, rng = make_draft(FAMILY, target, tmp_path / "draft"), random.Random(3)
    prompts = [[rng.randrange(1000) for _ in range(count)] for count in LENGTHS]
    off = target_flags(FAMILY, target, [*POOL, *LAYOUT, "--disable-overlap-schedule"])
    with PreloadedServer(off, tmp_path / "off.log", TINY_ENVIRONMENT) as server:
        client = server.client()
        expected = [ask_off(client, prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    answers = tmp_path / "answers.json"
    known = [(prompt, answer.ids) for prompt, answer in zip(prompts, expected, strict=True)]
    answers.write_text(json.dumps({"image_token": None, "answers": known}))
    every_width = ARMS["every width"].environment | {
        "REPLAYED_ANSWERS": str(answers),
        "REPLAYED_TAPS": str(tmp_path / "taps.pt"),
    }
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    on = target_flags(FAMILY, target, [*POOL, *LAYOUT, *speculate])
    with PreloadedServer(on, tmp_path / "on.log", every_width) as server:
        got = server.client().generate_all(prompts, 4, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert_equal_tokens(got, expected, [str(prompt) for prompt in prompts])
    assert tau(got) > 1.5

"""A quantised target and a quantised draft: the tokens of speculation off, in the steps of the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from arms import FULL, MAX_NEW_TOKENS, ON_CPU, POOL, assert_same_steps, pick
from baseline import chat_ids
from changed_models import in_fp8, meant_by_fp8
from reference_pair import ReferencePair
from transformers import PreTrainedTokenizerBase

from equality import ask_off, assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_DRAFT, TINY_ENVIRONMENT, TINY_OVERLAPPING, TINY_TARGET, held_out_prompts

pytestmark = pytest.mark.server


def test_both_in_fp8(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Fails where the draft's or the target's weights are read without their scales, or with another block's: tokens or
    steps then differ from those of the plain weights that they mean. Also where an update ends the server."""
    target, draft = in_fp8(TINY_TARGET, tmp_path / "target"), in_fp8(TINY_DRAFT, tmp_path / "draft")
    off = [*ON_CPU, "--model-path", str(target), *POOL]
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": p.prompt}]) for p in pick(held_out_prompts(), 5)]
    with PreloadedServer(off, tmp_path / "off.log", TINY_ENVIRONMENT) as server:
        expected = [ask_off(server.client(), ids, max_new_tokens=MAX_NEW_TOKENS) for ids in prompts]
    with PreloadedServer([*off, *speculate], tmp_path / "on.log", TINY_OVERLAPPING | FULL) as server:
        answers = [server.client().generate(ids, max_new_tokens=MAX_NEW_TOKENS) for ids in prompts]
        refused = server.client().post("/update_weights_from_disk", {"model_path": str(target)})
        again = server.client().generate(prompts[0], max_new_tokens=MAX_NEW_TOKENS)
    assert refused.status_code == 400 and "cannot be updated" in refused.text and again.ids == answers[0].ids
    assert_equal_tokens(answers, expected, prompts)
    plain_pair = (meant_by_fp8(folder, tmp_path / f"plain-{folder.name}") for folder in (target, draft))
    for answer, meant in zip(answers, ReferencePair(*plain_pair).generate(prompts, MAX_NEW_TOKENS), strict=True):
        assert answer.ids == meant.ids
        assert_same_steps(answer, meant.commit_lens)
    assert tau(answers) > 2.0

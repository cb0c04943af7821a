"""A draft takes the same steps whatever layout it was published in, and one whose anchor drafts, too, drafts K."""

from __future__ import annotations

import pytest
import torch
from pairs import make_draft, make_target, random_ids

from published_layouts import SAME_STEPS, publish
from sglang_dflash.reference import DFlashDraftModel, FeatureTaps
from sglang_dflash.serving import TINY_DRAFT


@pytest.mark.parametrize("layout", SAME_STEPS)
def test_the_same_steps(layout, target, prompts, tmp_path, monkeypatch):
    """Fails where a layout changes what is drafted; also where the draft is so bad that the test would not see it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    steps = []
    for folder in (TINY_DRAFT, publish(layout, tmp_path / "draft")):
        draft = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
        asked = [torch.tensor([prompt]) for prompt in prompts[::6]]
        done = [draft.spec_generate(target, ids, 64, return_stats=True) for ids in asked]
        steps.append([one.commit_lens[0] for one in done])
    assert steps[0] == steps[1]
    assert max(max(lens) for lens in steps[0]) > 4


def test_an_anchor_that_drafts():
    """Fails where the anchor's row gives no draft, or a step has too few rows."""
    target, draft = make_target("llama"), make_draft({"sample_from_anchor": True})
    done = draft.spec_generate(target, random_ids(9, requests=3), 60, [], return_stats=True)
    alone = target.generate(random_ids(9, requests=3), max_new_tokens=60, do_sample=False)
    assert done.output_ids.equal(alone)
    assert {*range(1, 6)} == {length for lens in done.commit_lens for length in lens}


def test_the_embedding_is_a_tap():
    """Fails where -1 is anything but what enters the first layer."""
    target, ids = make_target("qwen3"), random_ids(9)
    taps = FeatureTaps(target, [-1, 1])
    with taps, torch.inference_mode():
        states = target(ids, output_hidden_states=True).hidden_states
    assert taps.take().equal(torch.cat((states[0], states[2]), dim=-1))

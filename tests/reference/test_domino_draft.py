"""A Domino draft in transformers: its checkpoint and its answers."""

from __future__ import annotations

import pytest
import torch
from pairs import VOCABULARY, make_draft, make_target, random_ids
from safetensors.torch import load_file

from sglang_dflash.reference import DFlashDraftModel

KEYS = {"projector_type": "domino", "gru_hidden_dim": 6, "emb_dim": 3, "pure_draft_prefix_len": 1}


def _domino(shift_label: bool = False) -> DFlashDraftModel:
    draft = make_draft({**KEYS, "shift_label": shift_label})
    with torch.no_grad():
        for weight in [*draft.prefix_gru.parameters(), *draft.embed_proj.parameters()]:
            torch.nn.init.normal_(weight)
    return draft


def test_checkpoint(tmp_path):
    """Fails where the projector's names are not the host's, or loading changes it."""
    draft = _domino()
    draft.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(weight.shape) for name, weight in weights.items() if "gru" in name or "proj.0" in name}
    assert shapes == {
        "prefix_gru.weight_ih_l0": (18, 64),
        "prefix_gru.weight_hh_l0": (18, 6),
        "embed_proj.0.weight": (3, 70),
    }
    assert weights["embed_proj.2.weight"].shape == (VOCABULARY, 3)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.mark.parametrize("shift_label", [False, True])
@pytest.mark.parametrize("block_size", [None, 2])
def test_the_target_s_greedy_answer(shift_label, block_size):
    """Fails where Domino's drafts change an answer, are never accepted, or requests in a batch mix."""
    target, draft = make_target("qwen3"), _domino(shift_label)
    prompts = random_ids(9, requests=3)
    options = {"stop_token_ids": [], "block_size": block_size, "return_stats": True}
    answer = draft.spec_generate(target, prompts, 40, **options)
    for request, prompt in enumerate(prompts):
        expected = target.generate(prompt[None], max_new_tokens=40, do_sample=False)[0, 9:].tolist()
        assert answer.new_ids(request) == expected
        alone = draft.spec_generate(target, prompt[None], 40, **options)
        assert alone.commit_lens[0] == answer.commit_lens[request]
    assert answer.tau > 1.0

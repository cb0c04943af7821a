"""A DFlash2 draft in transformers: what its convolutions reach, how it starts, its checkpoint, and its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pairs import SMALL, VOCABULARY, make_draft, make_target, random_ids
from safetensors.torch import load_file, save_file

from sglang_dflash.reference import DFlashDraftModel

pytestmark = pytest.mark.slow

KEYS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 3}
PREFIX, BLOCK = 5, 4


def _dflash2(dflash: dict[str, Any] | None = None, noise: float = 0.3, **options: Any) -> DFlashDraftModel:
    """A draft of random weights; its convolutions and selector have influence unless `noise` is 0."""
    draft = make_draft({**KEYS, **(dflash or {})}, architectures=["DFlash2DraftModel"], **options)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "conv." in name or "codebook" in name:
                weight += noise * torch.randn(weight.shape, generator=generator)
    return draft


def _inputs(blocks: int = 1) -> dict[str, torch.Tensor]:
    """Blocks of four at position 5, all of one request."""
    generator = torch.Generator().manual_seed(3)
    hidden = SMALL["hidden_size"]
    rows = torch.arange(PREFIX, PREFIX + BLOCK).repeat(blocks)
    return {
        "noise_embedding": torch.randn(1, blocks * BLOCK, hidden, generator=generator),
        "target_hidden": torch.randn(1, PREFIX, 2 * hidden, generator=generator),
        "position_ids": torch.cat((torch.arange(PREFIX), rows))[None],
    }


def _without_heads(draft: DFlashDraftModel) -> DFlashDraftModel:
    """The plain draft with the same weights."""
    plain = make_draft()
    weights = {name: weight for name, weight in draft.state_dict().items() if name in plain.state_dict()}
    plain.load_state_dict(weights)
    return plain


@torch.inference_mode()
def test_it_starts_as_the_plain_draft():
    """Fails where a new draft's convolutions are not the identity, or its selector has influence."""
    draft = _dflash2(noise=0.0)
    plain = _without_heads(draft)
    hidden = draft(**_inputs())
    assert torch.equal(hidden, plain(**_inputs()))
    head = torch.nn.Linear(SMALL["hidden_size"], VOCABULARY)
    anchors = torch.tensor([1])
    drafted, expected = (one.choose(hidden, anchors, head, torch.nn.Identity()) for one in (draft, plain))
    assert torch.equal(drafted, expected)


@torch.inference_mode()
def test_convolutions_stay_in_their_block():
    """Fails where a block's first row reads the block before it, or a convolution changes the context's keys."""
    draft, inputs = _dflash2(), _inputs(blocks=2)
    sees = torch.zeros(2 * BLOCK, PREFIX + 2 * BLOCK, dtype=torch.bool)
    sees[:, :PREFIX] = True
    for block in range(2):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        sees[rows, PREFIX + block * BLOCK : PREFIX + (block + 1) * BLOCK] = True
    masks = dict.fromkeys(draft.draft_config.attention, sees[None, None])
    both = draft(**inputs, attention_mask=masks, block_size=BLOCK)
    for block in range(2):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        own = inputs | {
            "noise_embedding": inputs["noise_embedding"][:, rows],
            "position_ids": _inputs()["position_ids"],
        }
        torch.testing.assert_close(both[:, rows], draft(**own))


@torch.inference_mode()
def test_a_shorter_block_is_the_block_s_start_in_causal_layers():
    """Fails where a block of fewer rows is convolved with other rows: with causal layers, nothing reaches ahead."""
    draft, inputs = _dflash2(is_causal=True), _inputs()
    whole = draft(**inputs)
    short = {
        **inputs,
        "noise_embedding": inputs["noise_embedding"][:, :2],
        "position_ids": inputs["position_ids"][:, :-2],
    }
    torch.testing.assert_close(draft(**short), whole[:, :2])


def test_checkpoint(tmp_path):
    """Fails where a saved DFlash2 draft is read as another one, its names are not the host's, or loading changes it."""
    draft = _dflash2()
    draft.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
    weights = load_file(tmp_path / "model.safetensors")
    head = {name for name in weights if "conv" in name or "selector" in name}
    convolutions = {
        f"layers.{i}.{part}_conv.{name}"
        for i in range(2)
        for part in ("attention", "mlp")
        for name in ("base_kernel", "kernel_projection.weight")
    }
    parts = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    assert head == convolutions | {f"candidate_selector.{part}" for part in parts}
    assert weights["layers.0.mlp_conv.base_kernel"].shape == (2, 2, 64)
    assert weights["layers.0.mlp_conv.kernel_projection.weight"].shape == (2 * 2 * 4, 64)
    assert weights["candidate_selector.successor_codebook"].shape == (VOCABULARY, 6)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.mark.parametrize("name", ["candidate_selector.hidden_projection.weight", "layers.1.attention_conv.base_kernel"])
def test_missing_weight(tmp_path, name):
    """Fails where a part of the head is left as it starts."""
    _dflash2().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"missing keys.*{name}"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("dflash", [{}, {"conv_kernel_size": None, "conv_group_size": None}])
@pytest.mark.parametrize("block_size", [None, 2, 3])
def test_the_target_s_greedy_answer(dflash, block_size):
    """Fails where a draft of the selector changes an answer, is never accepted, or requests in a batch mix."""
    target, draft = make_target("qwen3"), _dflash2(dflash)
    prompts = random_ids(9, requests=3)
    answer = draft.spec_generate(target, prompts, 40, stop_token_ids=[], block_size=block_size, return_stats=True)
    for request, prompt in enumerate(prompts):
        expected = target.generate(prompt[None], max_new_tokens=40, do_sample=False)[0, 9:].tolist()
        assert answer.new_ids(request) == expected
        alone = draft.spec_generate(
            target, prompt[None], 40, stop_token_ids=[], block_size=block_size, return_stats=True
        )
        assert alone.commit_lens[0] == answer.commit_lens[request]
    assert answer.tau > 1.0
    plain = _without_heads(draft).spec_generate(target, prompts, 40, stop_token_ids=[], return_stats=True)
    assert block_size is not None or plain.commit_lens != answer.commit_lens, "the head changes no draft"


def test_the_selector_must_know_the_target_s_tokens():
    """Fails where a target with more tokens than the selector's tables ends in an index error."""
    draft = _dflash2(vocab_size=VOCABULARY - 1, dflash={"mask_token_id": 0})
    with pytest.raises(ValueError, match="vocab_size is 4 and the target's 5"):
        draft.spec_generate(make_target("qwen3"), random_ids(4), 4)

"""Models and arguments that do not fit are refused in one sentence that names what came and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairs import SMALL, TARGET_LAYERS, VOCABULARY, draft_config, make_draft, make_target, random_ids
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from sglang_dflash.reference import DFlashDraftModel, decoder_layers


def _refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as refused:
        call()
    sentence = str(refused.value)
    assert sentence.endswith(".") and "\n" not in sentence, sentence
    return sentence


def test_unknown_target():
    """Fails where a target runs whose masks and positions are not checked."""
    target = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=TARGET_LAYERS, n_head=4))
    sentence = _refusal(lambda: make_draft().spec_generate(target, random_ids(5), 4))
    assert "'gpt2'" in sentence and "llama, qwen2" in sentence
    assert "list of 4 decoder layers" in _refusal(lambda: decoder_layers(target))


def test_target_with_another_attention():
    """Fails where a target runs whose attention takes no mask tensor: it would see rejected rows."""
    target = make_target("qwen3")
    target.config._attn_implementation = "flash_attention_2"
    sentence = _refusal(lambda: make_draft().spec_generate(target, random_ids(5), 4))
    assert "'flash_attention_2'" in sentence and "attn_implementation='sdpa'" in sentence


@pytest.mark.parametrize(
    ("dflash", "options", "expected"),
    [
        ({}, {"hidden_size": 32}, ["hidden_size is 32", "target's is 64"]),
        ({"target_layer_ids": [0, TARGET_LAYERS]}, {}, ["target_layer_ids has [4]", "0 to 3"]),
        ({"mask_token_id": VOCABULARY}, {}, ["mask_token_id is 5", "5 token ids"]),
    ],
    ids=["hidden-size", "taps", "mask"],
)
def test_draft_of_another_target(dflash, options, expected):
    """Fails where a draft runs with embeddings of another width, or with a layer or a mask id that does not exist."""
    draft, target = make_draft(dflash, **options), make_target("qwen3")
    sentence = _refusal(lambda: draft.spec_generate(target, random_ids(5), 4))
    assert all(part in sentence for part in expected), sentence


def test_mask_known_by_text_only():
    """Fails where a draft whose config gives only the mask's text runs with an invented mask id."""
    draft = make_draft({"mask_token_id": None, "mask_token": "<|MASK|>"})
    sentence = _refusal(lambda: draft.spec_generate(make_target("qwen3"), random_ids(5), 4))
    assert "'<|MASK|>'" in sentence and "mask_token_id" in sentence


def test_mask_known_by_text_and_given():
    """Fails where a given mask id is refused, or another one is used."""
    target = make_target("qwen3")
    named = make_draft({"mask_token_id": None, "mask_token": "<|MASK|>"})
    given = named.spec_generate(target, random_ids(5), 20, mask_token_id=2, return_stats=True)
    own = make_draft({"mask_token_id": 2}).spec_generate(target, random_ids(5), 20, return_stats=True)
    assert given.commit_lens == own.commit_lens and torch.equal(given.output_ids, own.output_ids)


def test_mask_outside_the_vocabulary_given():
    """Fails where a given mask id outside the vocabulary ends in an IndexError."""
    draft, target = make_draft(), make_target("qwen3")
    sentence = _refusal(lambda: draft.spec_generate(target, random_ids(5), 4, mask_token_id=VOCABULARY))
    assert "mask_token_id is 5" in sentence


def test_prompt_without_a_token():
    """Fails where a row that is all padding is generated from its padding."""
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    draft, target = make_draft(), make_target("qwen3")
    ids = random_ids(3, requests=2)
    assert "one token each" in _refusal(lambda: draft.spec_generate(target, ids, 4, attention_mask=mask))


@pytest.mark.parametrize("shape", [(3,), (1, 3, 1), (0, 3)])
def test_prompts_of_another_shape(shape):
    """Fails where ids of another shape raise an error inside the model."""
    draft, target = make_draft(), make_target("qwen3")
    ids = torch.zeros(shape, dtype=torch.long)
    assert f"shape {shape}" in _refusal(lambda: draft.spec_generate(target, ids, 4))


def test_negative_temperature():
    """Fails where a negative temperature counts as greedy."""
    draft, target = make_draft(), make_target("qwen3")
    assert "temperature is -1.0" in _refusal(lambda: draft.spec_generate(target, random_ids(5), 4, temperature=-1.0))


@pytest.mark.parametrize(
    ("max_new_tokens", "block_size", "expected"),
    [
        (0, 4, "max_new_tokens is 0"),
        (-1, 4, "max_new_tokens is -1"),
        (4, 1, "block_size is 1"),
        (4, 0, "block_size is 0"),
    ],
)
def test_numbers_out_of_range(max_new_tokens, block_size, expected):
    """Fails where such a call returns an answer, or never ends."""
    draft, target = make_draft(), make_target("qwen3")
    sentence = _refusal(lambda: draft.spec_generate(target, random_ids(5), max_new_tokens, block_size=block_size))
    assert expected in sentence and "at least" in sentence


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_draft().save_pretrained(tmp_path)
    return tmp_path


def test_missing_weight(checkpoint):
    """Fails where a missing weight only causes transformers' warning and is random."""
    weights = load_file(checkpoint / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    sentence = _refusal(lambda: DFlashDraftModel.from_pretrained(checkpoint))
    assert "missing" in sentence and "fc.weight" in sentence and str(checkpoint) in sentence


def test_unexpected_weight(checkpoint):
    """Fails where a checkpoint with more weights than a plain draft is loaded as a plain draft."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["markov.weight"] = torch.zeros(2, 2)
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    sentence = _refusal(lambda: DFlashDraftModel.from_pretrained(checkpoint))
    assert "unexpected" in sentence and "markov.weight" in sentence


def test_weight_of_another_shape(checkpoint):
    """Fails where a weight of another shape is replaced by a random one, or the error does not name it."""
    weights = load_file(checkpoint / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"][:, 1:].contiguous()
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    sentence = _refusal(lambda: DFlashDraftModel.from_pretrained(checkpoint))
    assert "mismatched" in sentence and "fc.weight" in sentence


def test_mask_embedding(checkpoint):
    """Fails where a mask embedding of another width is read."""
    torch.save(torch.zeros(SMALL["hidden_size"] + 1), checkpoint / "mask_embedding.pt")
    assert "mask_embedding.pt" in _refusal(lambda: DFlashDraftModel.from_pretrained(checkpoint))


@pytest.mark.parametrize(
    "change", [{"architectures": ["DominoDraftModel"]}, {"dflash_config": {"projector_type": "domino"}}]
)
def test_another_head(checkpoint, change):
    """Fails where a Domino draft is loaded without its projector."""
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    config["dflash_config"].update(change.pop("dflash_config", {}))
    file.write_text(json.dumps({**config, **change}))
    assert "omino" in _refusal(lambda: DFlashDraftModel.from_pretrained(checkpoint))


def test_config_without_a_draft():
    """Fails where a config that is not a draft's, such as a target's, becomes a model."""
    config = draft_config()
    config.dflash_config = {}
    assert "no mask" in _refusal(lambda: DFlashDraftModel(config))

"""The MLX engine commits what `spec_generate` does, in the same steps, and what mlx-lm alone would."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import VOCABULARY, make_draft, make_target, random_ids
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from sglang_dflash.core.draft_config import LayerAttention
from sglang_dflash.reference import DFlashDraftModel, block_mask
from sglang_dflash.serving import PAIRS, TINY_DRAFT, TINY_TARGET

pytest.importorskip("mlx.core", reason="MLX is not installed; the extra [mlx] brings it.", exc_type=ImportError)
import mlx.core as mx
import mlx_lm

from sglang_dflash.reference import mlx as engine

pytestmark = pytest.mark.slow

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The model's folder; a target of random weights gets the tiny pair's tokenizer, which knows its ids."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_TARGET / name, folder)
    return folder


def answer_of(model: Any, draft: Any, tokenizer: Any, prompt: list[int], limit: int, **options: Any) -> Any:
    """The ids, the commit_lens, and the last finish_reason."""
    steps = list(engine.stream_generate(model, draft, tokenizer, prompt, limit, **options))
    assert steps[0].commit_len == 0 and all(step.finish_reason is None for step in steps[:-1])
    ids = [token for step in steps for token in step.ids]
    return ids, [step.commit_len for step in steps[1:]], steps[-1].finish_reason


def assert_same(target: PreTrainedModel, draft: DFlashDraftModel, folder: Path, limit: int = 40) -> list[int]:
    """Fails where MLX and transformers part in ids or steps, of pairs of random weights; returns the commit_lens."""
    model, tokenizer = engine.load_target(saved(target, folder / "target"))
    loaded = engine.load_draft(saved(draft, folder / "draft"))
    lens, seen = [], set()
    for length in (1, 9, 33):
        ids = random_ids(length, seed=length)
        expected = draft.spec_generate(target, ids, limit, [], return_stats=True)
        got = answer_of(model, loaded, tokenizer, ids[0].tolist(), limit, stop_token_ids=[])
        assert got == (expected.new_ids(0), expected.commit_lens[0], "length")
        lens += got[1]
        seen |= {*got[0]}
    assert len(seen) > 2, "the target repeats itself"
    return lens


def test_the_tiny_pair(target, draft, prompts):
    """Fails where ids or steps are not those of transformers, ids not mlx-lm's own, or the text not the tokenizer's."""
    model, tokenizer = engine.load_target(TINY_TARGET, mx.float32)
    loaded, seen = engine.load_draft(TINY_DRAFT, mx.float32), set()
    plain_model, _ = mlx_lm.load(str(TINY_TARGET))
    plain_model.set_dtype(mx.float32)
    for prompt in prompts:
        expected = draft.spec_generate(target, torch.tensor([prompt]), 60, return_stats=True)
        steps = list(engine.stream_generate(model, loaded, tokenizer, prompt, 60))
        ids = [token for step in steps for token in step.ids]
        assert ids == expected.new_ids(0)
        assert ids == [one.token for one in mlx_lm.stream_generate(plain_model, tokenizer, prompt, max_tokens=60)]
        assert [step.commit_len for step in steps[1:]] == expected.commit_lens[0]
        assert "".join(step.text for step in steps) == tokenizer.decode(ids, skip_special_tokens=True)
        seen |= {*expected.commit_lens[0]}
    assert {1, draft.block_size} <= seen


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 128}),
    ],
    ids=["theta", "llama3", "biased", "tied", "yarn"],
)
def test_random_targets(kind, options, tmp_path):
    """Fails where a target is read in another way than in transformers: mlx-lm alone ignores some configs' rotary
    embedding. Also where no draft is accepted."""
    assert max(assert_same(make_target(kind, **options), make_draft(), tmp_path)) > 1


def test_a_mixture(tmp_path):
    """Fails where a Qwen3 MoE target's layers are tapped at another place, or its scaled frequencies are not read."""
    torch.manual_seed(0)
    dense = make_target("qwen3").config.to_dict()
    kept = {
        key: dense[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "initializer_range")
    }
    kept |= {key: dense[key] for key in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "tie_word_embeddings": False}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = Qwen3MoeConfig(**kept, **experts, **ends, rope_parameters=YARN, max_position_embeddings=128)
    assert max(assert_same(Qwen3MoeForCausalLM(config).eval(), make_draft(), tmp_path)) > 1


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 6}


@pytest.mark.parametrize(
    ("dflash", "options"),
    [
        ({}, SLIDING),
        ({}, {**SLIDING, "is_causal": False, "sliding_window": 3}),
        ({}, {"is_causal": True, "attention_bias": True}),
        ({}, {"rope_parameters": YARN, "max_position_embeddings": 128}),
        ({}, {"rope_theta": 300.0, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}),
        ({"sample_from_anchor": True}, {}),
        ({"target_layer_ids": [-1, 1]}, {}),
    ],
    ids=["sliding", "short-window", "causal", "yarn", "other-heads", "anchor-first", "embedding"],
)
def test_kinds_of_drafts(dflash, options, tmp_path):
    """Fails where a draft of another kind takes other steps than in transformers, or no draft is accepted."""
    assert max(assert_same(make_target("llama"), make_draft(dflash, **options), tmp_path)) > 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_masks(causal, window):
    """Fails where a row of the block sees other keys than in transformers."""
    kind = LayerAttention(causal, window)
    mine = engine.block_mask(4, 11, kind)
    theirs = block_mask(torch.arange(7, 11)[None], 11, kind, ragged=False)
    assert (mine is None) == (theirs is None)
    assert mine is None or mine.tolist() == theirs[0, 0].tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, Any, Any, PreTrainedModel]:
    """Model, draft and tokenizer of random weights in MLX, in which every token has a chance; and the target."""
    folder, target = tmp_path_factory.mktemp("pair"), make_target("qwen3", initializer_range=0.15)
    model, tokenizer = engine.load_target(saved(target, folder / "target"))
    return model, engine.load_draft(saved(make_draft(), folder / "draft")), tokenizer, target


def test_ends(pair):
    """Fails where an answer is longer or shorter than its limit, or does not end with its first end token, at any place
    in a block; or a block of another size changes a token."""
    model, draft, tokenizer, _ = pair
    prompt = random_ids(9)[0].tolist()
    endless, lens, _ = answer_of(model, draft, tokenizer, prompt, 30, stop_token_ids=[])
    assert max(lens) > 1
    for limit in range(1, 12):
        assert answer_of(model, draft, tokenizer, prompt, limit, stop_token_ids=[])[::2] == (endless[:limit], "length")
    for stop in {*endless}:
        place = endless.index(stop) + 1
        ids, _, reason = answer_of(model, draft, tokenizer, prompt, 30, stop_token_ids=[stop])
        assert (ids, reason) == (endless[:place], "stop")
    for size in (2, 3, 6):
        ids, lens, _ = answer_of(model, draft, tokenizer, prompt, 30, stop_token_ids=[], block_size=size)
        assert ids == endless and max(lens) <= size


def test_samples(pair):
    """Fails where a sample has another distribution than the target's: a draft is too likely, or a row's draw is
    another's."""
    model, draft, tokenizer, target = pair
    ids, temperature, samples = random_ids(9), 0.7, 1500
    sampler = mlx_lm.sample_utils.make_sampler(temperature)
    mx.random.seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    lens: Counter[int] = Counter()
    for _ in range(samples):
        got = answer_of(model, draft, tokenizer, ids[0].tolist(), 2, stop_token_ids=[], sampler=sampler)
        counts[tuple(got[0])] += 1
        lens.update(min(one, 2) for one in got[1])
    with torch.inference_mode():
        first = (target(ids).logits[0, -1].double() / temperature).softmax(-1)
        behind = torch.cat((ids.expand(VOCABULARY, -1), torch.arange(VOCABULARY)[:, None]), dim=1)
        second = (target(behind).logits[:, -1].double() / temperature).softmax(-1)
    expected = {(a, b): samples * float(first[a] * second[a, b]) for a in range(VOCABULARY) for b in range(VOCABULARY)}
    common = {key: value for key, value in expected.items() if value >= 5}
    statistic = sum((counts[key] - value) ** 2 / value for key, value in common.items())
    freedom = len(common) - 1
    assert freedom > 8 and statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom, counts)
    assert lens[1] > 50 and lens[2] > 50, "drafts are always or never accepted"


def refusal(call: Any) -> str:
    with pytest.raises(ValueError) as refused:
        call()
    sentence = str(refused.value)
    assert sentence.endswith(".") and "\n" not in sentence, sentence
    return sentence


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 3}
DOMINO = {
    "projector_type": "domino",
    "gru_hidden_dim": 6,
    "emb_dim": 3,
    "pure_draft_prefix_len": 1,
    "shift_label": True,
}


@pytest.mark.parametrize(
    ("dflash", "options", "named"),
    [
        (SELECTOR, {"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        (DOMINO, {}, "Domino"),
        ({"attention_sink_bias": True}, {}, "sinks"),
        ({"attention_value_scale": 2.0}, {}, "scaled values"),
        ({}, {"use_gemma_norm": True}, "Gemma"),
        ({}, {"hidden_act": "gelu"}, "gelu"),
        ({}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
    ids=["dflash2", "domino", "sinks", "scale", "gemma", "gelu", "rope"],
)
def test_other_drafts(dflash, options, named, tmp_path):
    """Fails where a draft that is not plain is loaded as if it were."""
    folder = saved(make_draft(dflash, **options), tmp_path)
    assert named in refusal(lambda: engine.load_draft(folder))


def test_files_that_do_not_fit(tmp_path):
    """Fails where an unknown key, an unknown or missing weight, or a mask embedding is ignored."""
    folder = saved(make_draft(), tmp_path)
    torch.save(torch.zeros(64), folder / "mask_embedding.pt")
    assert "mask embedding" in refusal(lambda: engine.load_draft(folder))
    (folder / "mask_embedding.pt").unlink()
    file, weights = folder / "config.json", mx.load(str(folder / "model.safetensors"))
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "dflash_config": {**config["dflash_config"], "new_key": 1}}))
    assert "new_key" in refusal(lambda: engine.load_draft(folder))
    file.write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "more.safetensors"), {"markov.weight": mx.zeros((2, 2))})
    assert "markov.weight" in refusal(lambda: engine.load_draft(folder))
    (folder / "more.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), {key: weights[key] for key in weights if key != "fc.weight"})
    assert "fc.weight" in refusal(lambda: engine.load_draft(folder))


def test_other_targets(pair, tmp_path):
    """Fails where a target runs whose state or cache keeps rejected drafts, or that the draft does not fit."""
    model, draft, tokenizer, _ = pair
    assert "qwen3_5" in refusal(lambda: engine.load_target(PAIRS["hybrid"][0]))
    sliding = make_target("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding_attention" in refusal(lambda: engine.load_target(saved(sliding, tmp_path / "sliding")))
    gelu = make_target("llama", hidden_act="gelu")
    assert "hidden_act is 'gelu'" in refusal(lambda: engine.load_target(saved(gelu, tmp_path / "gelu")))
    other = engine.load_draft(saved(make_draft({"target_layer_ids": [0, 4]}), tmp_path / "draft"))
    assert "target_layer_ids" in refusal(lambda: engine.stream_generate(model, other, tokenizer, [1], 4))
    for options, named in (
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"block_size": 1}, "block_size is 1"),
        ({"mask_token_id": VOCABULARY}, "mask_token_id is 5"),
    ):
        assert named in refusal(lambda options=options: engine.stream_generate(model, draft, tokenizer, [1], **options))
    assert "no tokens" in refusal(lambda: engine.stream_generate(model, draft, tokenizer, []))

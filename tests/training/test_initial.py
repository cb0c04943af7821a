"""Where a run starts: layers of the target itself, and a mask token that no text has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from families.models import make_target
from sglang_dflash.reference import FeatureTaps, decoder_layers
from sglang_dflash.serving import TINY_TARGET
from sglang_dflash.training.frozen import check_target, mask_token_id
from sglang_dflash.training.initial import copy_last_norm, copy_target
from sglang_dflash.training.trainer import Trainer


def _llama(folder: Path) -> str:
    """Random weights; its layers have no norms of heads."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_a_draft_of_the_targets_own_layers(family, options, tmp_path):
    """Fails if a weight of the last layers is lost, or the context of the draft is not what its last tap gives."""
    target = str(TINY_TARGET) if family == "Qwen3" else _llama(tmp_path / "target")
    trainer = Trainer(options(target=target, init="target", layers=2, mask_token_id=5, num_taps=None, taps=(0, 2)))
    draft, model = trainer.draft, trainer.target.model
    for own, its in zip(draft.layers, decoder_layers(model)[-2:], strict=True):
        given = its.state_dict()
        assert ("self_attn.q_norm.weight" in given) == (family == "Qwen3")
        for name, weight in own.state_dict().items():
            assert torch.equal(weight, given.get(name, torch.ones_like(weight))), name
    assert torch.equal(draft.norm.weight, model.get_decoder().norm.weight)
    assert torch.equal(draft.hidden_norm.weight, decoder_layers(model)[-2].input_layernorm.weight)
    ids = torch.arange(20, 28)[None]
    with FeatureTaps(model, [2]) as taps, torch.no_grad():
        model.get_decoder()(input_ids=ids)
        last = taps.take()
    torch.testing.assert_close(draft.fc(trainer.features([], ids)), last)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Qwen3 MoE", {}, r"not built as Llama's or Qwen3's are \(mlp\."),
        ("Qwen2", {}, r"not built as Llama's or Qwen3's are \(self_attn\.k_proj\.bias"),
        ("Qwen3 MoE", {"layers": 5}, r"the target has 4 layers; --layers is 5"),
    ],
    ids=str,
)
def test_other_layers_are_refused(family, changes, said, options, tmp_path):
    """Fails if a draft keeps random weights, or loses weights of the target."""
    target = str(make_target(family, tmp_path / "target"))
    with pytest.raises(ValueError, match=f"--init target: .*{said}"):
        Trainer(options(target=target, init="target", num_taps=None, taps=(0, 2), mask_token_id=5, **changes))


def test_norms_that_compute_otherwise_are_refused(options, tmp_path):
    """Fails if weights of the same names and shapes are taken from layers that use them otherwise."""
    trainer = Trainer(options(init="target", num_taps=None, taps=(0, 2)))
    its = decoder_layers(trainer.target.model)[-1]
    its.input_layernorm.forward = lambda x: x * (1 + its.input_layernorm.weight)
    with pytest.raises(ValueError, match="not built as Llama's or Qwen3's are"):
        copy_target(trainer.draft, trainer.target.model)


def test_rounding_is_no_other_layer(options):
    """Fails if a target in bfloat16 is refused, whose layers give large values: SmolLM2's are such."""
    trainer = Trainer(options(init="target", num_taps=None, taps=(0, 2), target_dtype="bfloat16"))
    for its in decoder_layers(trainer.target.model):
        its.mlp.down_proj.weight.data.mul_(1000)
    copy_target(trainer.draft, trainer.target.model)
    its = decoder_layers(trainer.target.model)[-1]
    assert torch.equal(trainer.draft.layers[-1].mlp.down_proj.weight, its.mlp.down_proj.weight.float())


def test_a_new_draft_has_the_targets_last_norm(options):
    """Fails if a draft begins with another scale than the target's head expects, or takes another kind of norm."""
    trainer = Trainer(options())
    norm = trainer.target.model.get_decoder().norm
    assert torch.equal(trainer.draft.norm.weight, norm.weight) and (norm.weight != 1).any()
    trainer.draft.norm.weight.data.fill_(1)
    norm.forward = lambda x: x * (1 + norm.weight)
    copy_last_norm(trainer.draft, trainer.target.model)
    assert (trainer.draft.norm.weight == 1).all()


class Full:
    """A tokenizer that uses every row of the embedding: ids 1 to 7 are special."""

    mask_token_id = None
    eos_token_id, pad_token_id, bos_token_id = 2, 2, 1
    chat_template = "{{ '<s3>' }}"

    def __init__(self) -> None:
        self.added_tokens_decoder = {
            number: type("Added", (), {"special": number < 8, "content": f"<s{number}>"}) for number in range(1, 9)
        }

    def get_vocab(self) -> dict[str, int]:
        return {f"<{number}>": number for number in range(20)}


def test_a_full_vocabulary_names_its_candidates():
    """Fails if an end token, one of the chat template, one of the data or an ordinary one is offered as mask."""
    said = r"uses all 20 rows .*; 4 to 5, 7 may do: auto takes the first that the data does not have\."
    with pytest.raises(ValueError, match=said):
        mask_token_id(Full(), 20, None, {6, 10})
    assert mask_token_id(Full(), 20, "auto", {6, 10}) == 4
    assert mask_token_id(Full(), 20, 7, {7}) == 7
    with pytest.raises(ValueError, match=r"a token that occurs in no text\.$"):
        mask_token_id(Full(), 20, "auto", range(20))
    assert mask_token_id(Full(), 21, "auto", {6}) == 20  # a row without a token


def test_auto_is_the_default_where_there_is_one(options: Any):
    """Fails if --mask-token-id auto changes the mask of a target that has room for one."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    check_target(options(mask_token_id="auto"))
    assert Trainer(options(mask_token_id="auto")).draft.mask_token_id == mask_token_id(tokenizer, 1792, None)

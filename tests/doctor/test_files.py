"""What the files of a pair tell: each planted fault of config, weights and tokenizer in its sentence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted_drafts as plant
import pytest
import torch
from tokenizers import Tokenizer

from published_layouts import publish
from sglang_dflash.doctor import files
from sglang_dflash.doctor.card import read_card
from sglang_dflash.doctor.checkpoints import open_checkpoint
from sglang_dflash.doctor.findings import Level
from sglang_dflash.serving import PAIRS, TINY_DRAFT, TINY_TARGET
from sglang_dflash.training.smollm2 import DRAFT as SMOLLM2_DRAFT

HEAD = """---
base_model: {base}
model-index:
- name: draft
  results:
  - task: {{type: text-generation}}
    dataset: {{name: code, type: code}}
    metrics: [{{type: tau, name: Held-out tau, value: 7.48}}]
---
"""


def examined(draft: Path, target: Path = TINY_TARGET) -> list[files.Finding]:
    return files.examine(files.open_pair(str(target), str(draft)))


def bad(draft: Path, target: Path = TINY_TARGET) -> dict[str, tuple[str, str, str]]:
    """About -> level, sentence and cause, of all WARN and FAIL."""
    return {
        one.about: (str(one.level), one.said, one.cause)
        for one in examined(draft, target)
        if one.level in ("WARN", "FAIL")
    }


@pytest.mark.parametrize("name", PAIRS)
def test_the_embedded_pairs_are_sound(name: str) -> None:
    """Fails where a sound pair gets a WARN or FAIL, or a finding that needs doing has no `Fix:`."""
    target, draft = PAIRS[name]
    assert bad(draft, target) == {}


LOADED = """
import sys
from sglang_dflash.cli.main import run
sys.argv[1:1] = ["doctor", "--no-flags"]
try:
    run()
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_files_are_examined_without_heavy_libraries() -> None:
    """Fails where doctor loads what takes longer than all that it looks at: torch, transformers, SGLang."""
    words = [sys.executable, "-c", LOADED, "--model-path", str(TINY_TARGET), "--draft", str(TINY_DRAFT)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"tokenizers", "huggingface_hub"} <= loaded
    assert not loaded & {"torch", "transformers", "sglang", "safetensors"}


CONFIGS: dict[str, tuple[plant.Change, str, str, str, str]] = {
    # change of config.json -> about, level, words of the sentence, cause
    "mask outside": (plant.dflash(mask_token_id=1792), "draft and target", "FAIL", "mask_token_id is 1792", ""),
    "no mask": (plant.dflash(mask_token_id=None), "draft config", "FAIL", "names no mask", ""),
    "tap outside": (plant.dflash(target_layer_ids=[1, 3, 6]), "draft and target", "FAIL", "layers 0 to 5", ""),
    "hidden size": (plant.top(hidden_size=512), "draft and target", "FAIL", "hidden_size is 512", ""),
    "class": (plant.top(architectures=["EagleModel"]), "draft config", "FAIL", "['EagleModel']", ""),
    "context": (plant.top(max_position_embeddings=1024), "context", "FAIL", "is 1024 and the target's 2048", ""),
    "layers": (plant.top(num_hidden_layers=3, layer_types=["full_attention"] * 3), "draft weights", "FAIL", "lack", ""),
    "inner size": (plant.top(intermediate_size=512), "draft weights", "FAIL", "asks for [512, 256]", ""),
    "fewer layers": (
        plant.top(num_hidden_layers=1, layer_types=["full_attention"]),
        "draft weights",
        "WARN",
        "layers.1",
        "weights",
    ),
    "a key of nobody": (plant.dflash(target_layers=[1]), "draft config", "FAIL", "target_layers=[1]", ""),
    "mask of text": (plant.dflash(mask_token_id=300), "mask", "WARN", "a token of ordinary text", "mask"),
    "mask that ends": (plant.dflash(mask_token_id=1790), "mask", "WARN", "ends or pads a text", "mask"),
    "theta": (plant.rope_theta(1e6), "rope theta", "WARN", "1e+06 and the target's 10000", "theta"),
    "two thetas": (plant.top(rope_theta=5e5), "rope theta", "WARN", "in rope_parameters, which wins", "theta"),
    "causal": (plant.top(is_causal=True), "causality", "WARN", "makes the block causal", "causal"),
    "window left over": (plant.top(sliding_window=128), "window", "WARN", "is 128, but no layer has it", "window"),
    "layers of another": (plant.top(num_target_layers=36), "taps", "WARN", "a target of 36 layers", "target"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_fault_of_the_config_is_named(fault: str, tmp_path: Path) -> None:
    """Fails where a config that cannot be served, or is served with less acceptance, passes without its sentence."""
    change, about, level, words, cause = CONFIGS[fault]
    found = bad(plant.changed_config(tmp_path / "draft", change))
    assert found[about][0] == level and words in found[about][1] and found[about][2] == cause, found
    assert set(found) == {about} or fault == "hidden size", found  # whose weights have other shapes, too


def _without(part: str) -> Callable[[plant.Tensors], plant.Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def _transposed(tensors: plant.Tensors) -> plant.Tensors:
    return tensors | {"fc.weight": tensors["fc.weight"].T.contiguous()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without("fc."), "lack fc.weight"),
        (_without("layers.1."), "lack layers.1.input_layernorm.weight and 10 other tensors"),
        (_transposed, "fc.weight is [768, 256] (transposed)"),
        (lambda tensors: tensors | {"norm.weight": torch.zeros(64)}, "norm.weight is [64]"),
    ],
)
def test_a_fault_of_the_weights_is_named(
    change: Callable[[plant.Tensors], plant.Tensors], words: str, tmp_path: Path
) -> None:
    """Fails where weights that the config does not fit are not named, tensor and shape."""
    found = bad(plant.changed_weights(tmp_path / "draft", change))
    assert set(found) == {"draft weights"} and words in found["draft weights"][1]


def test_a_mask_token_without_its_id_is_looked_up(tmp_path: Path) -> None:
    """Fails where the tokenizer is not asked for `mask_token`, or a token that it lacks is no sentence."""
    good = plant.dflash(mask_token_id=None, mask_token="<|mask|>")
    assert bad(plant.changed_config(tmp_path / "good", good)) == {}
    wrong = bad(plant.changed_config(tmp_path / "wrong", plant.dflash(mask_token_id=None, mask_token="<|no|>")))
    assert wrong["draft config"][0] == "FAIL" and "'<|no|>' is not in the target's" in wrong["draft config"][1]


def _target(folder: Path, change: Callable[[Path], Any]) -> Path:
    shutil.copytree(TINY_TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    change(folder)
    return folder


def _thinks(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if enable_thinking %}<think>{% endif %}")


def _mute(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("{}")


def test_chat_templates(tmp_path: Path) -> None:
    """Fails where a switch for thinking, or a missing template, is overlooked."""
    switched = {one.about: one for one in examined(TINY_DRAFT, _target(tmp_path / "thinks", _thinks))}
    assert switched["chat template"].level == "PASS" and "enable_thinking" in switched["chat template"].said
    assert bad(TINY_DRAFT, _target(tmp_path / "mute", _mute))["chat template"][0] == "WARN"


def test_a_target_without_a_fast_tokenizer(tmp_path: Path) -> None:
    """Fails where its absence ends doctor in a traceback."""
    target = _target(tmp_path / "slow", lambda folder: (folder / "tokenizer.json").unlink())
    assert set(bad(TINY_DRAFT, target)) == {"tokenizer"}


def test_a_draft_with_another_tokenizer(tmp_path: Path) -> None:
    """Fails where the tokenizer in the draft's folder is not compared with the target's."""
    draft = shutil.copytree(TINY_DRAFT, tmp_path / "draft")
    tokenizer = Tokenizer.from_file(str(TINY_TARGET / "tokenizer.json"))
    tokenizer.save(str(draft / "tokenizer.json"))
    assert bad(draft) == {}
    tokenizer.add_tokens(["brandnew"])
    tokenizer.save(str(draft / "tokenizer.json"))
    assert bad(draft)["tokenizer"][2] == "target"


def test_the_card(tmp_path: Path) -> None:
    """Fails where the tau of `train`'s card is not read, a card without one ends doctor, or its target is ignored."""
    card = read_card(SMOLLM2_DRAFT)
    assert card.taus == {"own": 1.52, "code": 1.67, "gsm8k": 2.34, "boxed": 2.52}
    assert card.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    draft = shutil.copytree(TINY_DRAFT, tmp_path / "draft")
    for text in ("", "no head", "---\n: [\n---\n", "---\nbase_model: [a, b]\nmodel-index: nonsense\n---\n"):
        (draft / "README.md").write_text(text)
        assert read_card(draft).taus == {} and bad(draft) == {}
    (draft / "README.md").write_text(HEAD.format(base="Qwen/Qwen3-8B"))
    (base,) = [one for one in examined(draft) if one.about == "base model"]
    assert base.cause == "target" and not base.strong and "Qwen/Qwen3-8B" in base.said
    assert read_card(draft).taus == {"code": 7.48}


def test_a_published_pair_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a hub name needs more than the small files and the headers of the weights, or an absent one is no
    sentence."""
    import huggingface_hub

    def fetched(name: str, allow_patterns: list[str]) -> str:
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        if name != "me/draft":
            raise OSError("404\nmore")
        return str(shutil.copytree(TINY_DRAFT, tmp_path / "small", ignore=shutil.ignore_patterns("*.safetensors")))

    shapes = open_checkpoint(str(TINY_DRAFT), "--draft").shapes()
    tensors = {name: type("T", (), {"shape": list(shape)}) for name, shape in (shapes or {}).items()}
    metadata = type("M", (), {"files_metadata": {"model.safetensors": type("F", (), {"tensors": tensors})}})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda name: metadata)
    draft = open_checkpoint("me/draft", "--draft")
    assert not draft.here and draft.shapes() == shapes
    with pytest.raises(ValueError, match=r"--draft you/draft is no folder and cannot be fetched: 404$"):
        open_checkpoint("you/draft", "--draft")


@pytest.mark.parametrize("layout", ["ModelOpt", "NeMo Automodel", "speculators", "DeepSpec"])
def test_published_layouts_have_no_faults(layout: str, tmp_path: Path) -> None:
    """Fails where a draft is suspected for the keys of its trainer."""
    pair = files.open_pair(str(TINY_TARGET), str(publish(layout, tmp_path / "draft")))
    found = files.examine(pair)
    assert [one for one in found if one.level in (Level.FAIL, Level.WARN)] == []
    assert any(layout in one.said for one in found)

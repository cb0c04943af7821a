"""`targets.toml`, from which the table of targets in docs/compatibility.md is made, against the tests and SGLang."""

from __future__ import annotations

import ast
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mla_models import MLA_FAMILIES
from models import FAMILIES, PACKED
from nemotron_models import NEMOTRON_FAMILIES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from sglang_cpu.compiled import BY_DEFAULT
from sglang_dflash.host.patches.capture import EMBEDDING_ADDED
from sglang_dflash.host.start.arguments import VISION_TARGETS
from sglang_source import SGLANG

TARGETS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "targets.toml").read_text())["target"]
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEAD = "| target | published drafts | CPU | SGLang's own worker | note |\n|---|---|---|---|---|\n"
TICKS = {"yes": "✓", "no": "–"}
SETTER = "set_dflash_layers_to_capture"
# What `host/patches/capture.py` adds to classes that lack the setter of taps.
ADDED = {"set_eagle3_layers_to_capture", "set_dspark_layers_to_capture", "Glm4ForCausalLM"}


def table() -> str:
    """The table of the page."""
    rows = []
    for target in TARGETS:
        cpu, builtin = (TICKS.get(word, word) for word in (target.get("cpu", "yes"), target["builtin"]))
        cells = target["name"], target["drafts"] or "none found", cpu, builtin, target.get("note", "")
        rows.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(rows)


def test_the_page_has_the_table() -> None:
    """Fails where the page was not made anew after a change; see the head of targets.toml."""
    before, rest = PAGE.read_text().split(HEAD)
    rows, after = rest.split("\n\n", 1)
    if os.environ.get("SGLANG_DFLASH_UPDATE_TABLE") == "1":
        PAGE.write_text(f"{before}{table()}\n\n{after}")
    else:
        assert HEAD + rows == table()


def test_every_family_stands_for_one_target() -> None:
    """Fails where a tested family is missing, or a target is called tested without one."""
    named = [family for target in TARGETS for family in target["families"]]
    assert sorted(named) == sorted(FAMILIES)
    assert all("cpu" in target for target in TARGETS if not target["families"])


def test_quantised_weights_that_are_called_tested_are() -> None:
    """Fails where the table names a format of weights that no test has run with that target, or leaves out one."""
    formats = {name.rpartition(" in ")[2] for name in PACKED}
    for target in TARGETS:
        run = {name.rpartition(" in ")[2] for name in target["families"] if name in PACKED}
        assert {name for name in formats if name in target.get("note", "")} == run, target["name"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_of_its_targets_classes(family: str) -> None:
    """Fails where the model that is tested is of another class than the table names."""
    (target,) = [target for target in TARGETS if family in target["families"]]
    assert _class_of(family) in target["classes"], _class_of(family)
    if FAMILIES[family].sees:
        assert _class_of(family) in VISION_TARGETS


def _class_of(family: str) -> str:
    config = FAMILIES[family].config()
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if FAMILIES[family].sees else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = names.get(config.model_type) or config.architectures[0]
    return {"Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration"}.get(kind, kind)


def test_targets_compiled_unasked_are_compared_compiled() -> None:
    """Fails where a target is compiled by default although no test compares it, or one that is compared is left out.
    The embedded pair and `tests/e2e/test_train.py` compare Qwen3 and Llama."""
    # Gemma 3's rotary embedding is compiled by SGLang.
    untraced = (*MLA_FAMILIES, *NEMOTRON_FAMILIES, "Gemma 3", "Gemma 3 wrapper")
    compared = {_class_of(name) for name in FAMILIES if not FAMILIES[name].experts and name not in untraced}
    assert compared | {"Qwen3ForCausalLM", "LlamaForCausalLM"} == BY_DEFAULT


@cache
def _methods() -> dict[str, set[str]]:
    """SGLang's model class -> its own name and the names of its methods and those of its bases."""
    classes: dict[str, ast.ClassDef] = {}
    for file in (SGLANG / "srt" / "models").glob("*.py"):
        nodes = ast.parse(file.read_text()).body
        classes |= {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def found(name: str, below: frozenset[str] = frozenset()) -> set[str]:
        if name not in classes or name in below:  # some files name a class as its base in another file
            return set()
        node = classes[name]
        own = {part.name for part in node.body if isinstance(part, ast.FunctionDef)} | {name}
        return own.union(*(found(base.id, below | {name}) for base in node.bases if isinstance(base, ast.Name)))

    return {name: found(name) for name in classes}


@pytest.mark.parametrize("target", TARGETS, ids=[target["name"] for target in TARGETS])
def test_sglang_can_tap_its_classes(target: dict[str, Any]) -> None:
    """Fails where SGLang has no such class, where neither it nor we can set its taps or get its embedding, or where the
    table is wrong about SGLang's own worker, which needs its own setter."""
    methods = [_methods()[name] for name in target["classes"]]
    assert all(SETTER in own or own & ADDED for own in methods)
    assert all("get_input_embeddings" in own or own & EMBEDDING_ADDED for own in methods)
    if target["builtin"] == "yes":
        assert all(SETTER in own for own in methods)
    if target["builtin"] == "no":
        assert not any(SETTER in own for own in methods)


def test_wrappers_that_are_called_tested_are() -> None:
    """Fails where a class is left out of the warning about untested wrappers, and no test has run it."""
    tested = {name for target in TARGETS if target["families"] for name in target["classes"]}
    assert tested >= VISION_TARGETS

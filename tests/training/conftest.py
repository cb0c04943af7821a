"""The embedded pair in float32, its tokenizer, 40 conversations as JSONL, and a separate datasets cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET, held_out_prompts
from sglang_dflash.training import TrainOptions

CONVERSATIONS = 40


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """The tensors are tiny, and torch's threads spin between them: twenty times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _on_the_cpu() -> Iterator[None]:
    """These tests compute on the CPU, also on a machine with a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for child processes
        yield


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    """Resets accelerate, which otherwise keeps the precision of a process's first run for all later ones. Also behind
    a test, because fixtures of the next module come before this one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True, scope="session")
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches tokenized data in a fresh folder: in the home folder, data of an older run would be found."""
    folder = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_TARGET)


@pytest.fixture(scope="session")
def end_ids(tokenizer: Any) -> set[int]:
    return {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def draft() -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(TINY_DRAFT, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts and responses of held-out prompts of every kind."""
    path = tmp_path_factory.mktemp("data") / "asked.jsonl"
    prompts = held_out_prompts()[:: len(held_out_prompts()) // CONVERSATIONS][:CONVERSATIONS]
    path.write_text("".join(json.dumps({"prompt": p.prompt, "response": p.reference}) + "\n" for p in prompts))
    return path


@pytest.fixture
def options(data_file: Path, tmp_path: Path) -> Callable[..., TrainOptions]:
    """Makes options of a run that takes seconds, with changes."""

    def make(**changes: Any) -> TrainOptions:
        small: dict[str, Any] = {
            "target": str(TINY_TARGET),
            "data": (str(data_file),),
            "output": str(tmp_path / "draft"),
            "layers": 1,
            "num_taps": 2,
            "block_size": 4,
            "anchors": 8,
            "batch_size": 2,
            "max_length": 96,
            "max_steps": 2,
            "log_every": 1,
            "held_out": 0.1,
            "held_out_limit": 2,
        }
        return TrainOptions(**{**small, **changes})

    return make

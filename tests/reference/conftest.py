"""The embedded pair in float32, and held-out prompts of every kind as ids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET, held_out_prompts

PER_KIND = 4


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """With tiny tensors, torch's threads mostly spin: on a busy machine that is twenty times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def draft() -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(TINY_DRAFT, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """The first prompts of each kind."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_TARGET)
    kinds = sorted({prompt.kind for prompt in held_out_prompts()})
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.prompt}], add_generation_prompt=True, tokenize=False
        )
        for kind in kinds
        for p in held_out_prompts(kind)[:PER_KIND]
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

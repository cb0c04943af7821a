"""Runs a pair with the package's reference in float32: the ids the server should commit, and in which steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET

REQUESTS = 24  # per batch


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """ids: committed token ids with the end token; commit_lens: one per verify step."""

    ids: list[int]
    commit_lens: list[int]


class ReferencePair:
    """Target and draft in Hugging Face form; the embedded ones by default."""

    def __init__(self, target: Path = TINY_TARGET, draft: Path = TINY_DRAFT) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.draft = DFlashDraftModel.from_pretrained(draft, dtype=torch.float32).eval()

    def generate(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[ReferenceAnswer]:
        """Greedy answers to all prompts."""
        answers: list[ReferenceAnswer] = []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the server's other threads spin on the same cores
        for start in range(0, len(prompts), REQUESTS):
            answers += self._batch(prompts[start : start + REQUESTS], max_new_tokens)
        torch.set_num_threads(threads)
        return answers

    def _batch(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[ReferenceAnswer]:
        rows = [torch.tensor(prompt) for prompt in prompts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        generation = self.draft.spec_generate(self.target, ids, max_new_tokens, attention_mask=mask, return_stats=True)
        return [ReferenceAnswer(generation.new_ids(row), generation.commit_lens[row]) for row in range(len(rows))]

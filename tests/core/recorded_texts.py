"""Texts of a target with the draft's candidates at every position, and a machine that serves them.

So plans and fixed widths meet the same drafts. The seconds of a step and of a prefill are made up. The rows of prompts
and a plan's own work take none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from made_up_machines import PROMPT, K, Machine, World
from transformers import AutoModelForCausalLM

from sglang_dflash.core.policy import Fixed, Policy
from sglang_dflash.reference import DFlashDraftModel, FeatureTaps, spec_generate
from sglang_dflash.serving import TINY_DRAFT, TINY_TARGET
from sglang_dflash.serving.rendering import Renderer
from sglang_dflash.serving.traffic import prompt_of
from sglang_dflash.workloads.datasets import load

CANDIDATES = 8


@dataclass(frozen=True)
class Text:
    """An answer of L tokens. Entry i is of the block whose anchor is token i.

    Fields:
        chances: [L, K-1, k] float32; the draft's probabilities of its candidates, falling.
        taken: [L, K-1]; which candidate is the target's token; k: none is, or the answer has ended.
    """

    chances: np.ndarray
    taken: np.ndarray

    def __len__(self) -> int:
        return len(self.taken)


@torch.inference_mode()
def record(kind: str, count: int, tokens: int) -> list[Text]:
    """Greedy answers of the tiny pair to held-out prompts."""
    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32).eval()
    draft = DFlashDraftModel.from_pretrained(TINY_DRAFT, dtype=torch.float32).eval()
    taps, texts = FeatureTaps(target, draft.target_layer_ids), []
    size, embed = draft.block_size, target.get_input_embeddings()
    renderer = Renderer(str(TINY_TARGET), {})
    for session in load(kind, count, 0):
        prompt = prompt_of(session, session.turns[0].messages, renderer)
        whole = spec_generate(draft, target, torch.tensor([prompt]), tokens)
        with taps:
            target(whole)
            features = taps.take()
        answer = whole[0, len(prompt) :]
        chances = np.zeros((len(answer), size - 1, CANDIDATES), np.float32)
        taken = np.full((len(answer), size - 1), CANDIDATES)
        for i, anchor in enumerate(answer):
            block = torch.full((1, size), draft.mask_token_id)
            block[0, 0] = anchor
            positions = torch.arange(len(prompt) + i + size)[None]
            hidden = draft(draft.embed_block(embed(block)), features[:, : len(prompt) + i], positions)
            best = target.lm_head(hidden[0, 1:]).softmax(-1).topk(CANDIDATES)
            chances[i] = best.values.clamp(max=1 - 1e-6)
            for row, token in enumerate(answer[i + 1 : i + size]):
                found = (best.indices[row] == token).nonzero()
                taken[i, row] = int(found[0]) if len(found) else CANDIDATES
        texts.append(Text(chances, taken))
    return texts


class RecordedWorld(World):
    """Serves texts. A request's "skill" is its number in the order of service."""

    def __init__(self, machine: Machine, seed: int = 0) -> None:
        super().__init__(machine, candidates=CANDIDATES, seed=seed)
        self._texts: list[Text] = []
        self._at: list[int] = []  # of each text: the position of its anchor

    def rate(self, policy: Policy, texts: Iterable[Text], at_once: int) -> float:
        """Tokens per second; whenever a text ends, the next begins."""
        waiting, running, tokens, begun = iter(texts), dict[str, float](), 0, self.now
        while True:
            arrived = list(islice(waiting, at_once - len(running)))
            for text in arrived:
                running[f"text-{len(self._texts)}"] = len(self._texts)
                self._texts.append(text)
                self._at.append(0)
                tokens += len(text)
            if arrived:
                policy.interrupt(PROMPT * len(arrived))
                self.now += self.machine.prefill_s
            if not running:
                return tokens / (self.now - begun)
            step = self.step(policy, running)
            for (name, number), count in zip(list(running.items()), step.commit_lens, strict=True):
                self._at[int(number)] += count
                if self._at[int(number)] + 1 >= len(self._texts[int(number)]):  # the first is a prefill's
                    del running[name]

    def _text(self, of: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        blocks = [(self._texts[int(number)], self._at[int(number)]) for number in of.values()]
        return np.stack([text.chances[at] for text, at in blocks]), np.stack([text.taken[at] for text, at in blocks])


def shares(
    machine: Machine, before: tuple[list[Text], int], texts: list[Text], at_once: int, seeds: int = 4
) -> dict[int, float]:
    """Width -> the plan's rate over that of W rows for every request. before: what the planner has served before, and
    how many of it at once."""
    rate = 0.0
    for seed in range(seeds):
        world = RecordedWorld(machine, seed)
        planner = world.planner()
        world.rate(planner, *before)
        rate += world.rate(planner, texts, at_once) / seeds
    return {width: rate / RecordedWorld(machine).rate(Fixed(width), texts, at_once) for width in range(1, K + 1)}

"""The draft's training data: the target's own greedy answers and its tapped hidden states."""

import copy
import random
from collections import defaultdict
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from .draft import tap
from .progress import Progress
from .tokenizer import prompt_ids

MAX_NEW_TOKENS = 200
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt with the target's answer to it; `taps` is filled for training only."""

    ids: torch.Tensor  # [T] int64: prompt, answer, end token
    prompt_len: int
    taps: torch.Tensor  # [T, 3*H] bfloat16


@torch.no_grad()
def _greedy(model: Qwen3ForCausalLM, prompts: torch.Tensor, end: int) -> torch.Tensor:
    """Greedy continuation of prompts of one length, [N, T] -> [N, T + new]; rows past their end repeat it."""
    ids = prompts
    past = None
    alive = torch.ones(len(ids), dtype=torch.bool)
    step_input = ids
    for _ in range(MAX_NEW_TOKENS):
        out = model(input_ids=step_input, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        new = out.logits[:, -1].argmax(-1).masked_fill(~alive, end)
        alive &= new != end
        step_input = new[:, None]
        ids = torch.cat((ids, step_input), dim=1)
        if not alive.any():
            break
    return ids


def _same_length_batches(rows: list[list[int]]) -> list[torch.Tensor]:
    # Prompts of one length go together, so that no batch needs padding or a mask.
    groups: dict[int, list[list[int]]] = defaultdict(list)
    for row in rows:
        groups[len(row)].append(row)
    batches: list[torch.Tensor] = []  # each [N, T] int64
    for _, group in sorted(groups.items()):
        batches += [torch.tensor(group[i : i + _BATCH]) for i in range(0, len(group), _BATCH)]
    return batches


def regenerate(
    target: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    closed: set[str],
    seed: int,
) -> tuple[list[Answer], float]:
    """Answers of the target to `prompts`, shuffled, and the share of them that ended by themselves.

    Unended answers are left out, and so are answers whose text stands in `closed` (the held-out ones).
    """
    end = target.config.eos_token_id
    batches = _same_length_batches([prompt_ids(tokenizer, prompt) for prompt in prompts])
    progress = Progress("regenerate", len(batches))
    writer = copy.deepcopy(target).bfloat16()
    answers: list[Answer] = []
    ended = 0
    for batch in batches:
        prompt_len = batch.shape[1]
        grown = _greedy(writer, batch, end)
        # The residual stream stays float32 here, as it is where the pair is served.
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = target.model(input_ids=grown, use_cache=False, output_hidden_states=True).hidden_states
        taps = tap(hidden).to(torch.bfloat16)
        for row, row_taps in zip(grown, taps, strict=True):
            stops = (row[prompt_len:] == end).nonzero()
            if not len(stops):
                continue
            ended += 1
            length = prompt_len + int(stops[0]) + 1
            if tokenizer.decode(row[prompt_len : length - 1]) not in closed:
                answers.append(Answer(row[:length].clone(), prompt_len, row_taps[:length].clone()))
        progress.add(0.0, grown.numel() - batch.numel())
    random.Random(seed).shuffle(answers)
    return answers, ended / len(prompts)

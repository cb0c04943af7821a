"""Greedy DFlash against plain greedy decoding on the held-out prompts, as the pair is served."""

import ast
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from .arithmetic import final_number
from .draft import BLOCK_SIZE, DFlashDraft, tap
from .regenerate import MAX_NEW_TOKENS
from .snippets import fenced_code
from .tokenizer import prompt_ids
from .wording import Example


@dataclass(frozen=True, slots=True)
class Outcome:
    """One held-out prompt decoded both ways."""

    example: Example
    answer: str
    new_tokens: int
    ended: bool
    same_ids: bool
    least_gap: float  # smallest top-1 minus top-2 logit along the plain greedy path
    accept_lens: tuple[int, ...]  # one entry a block; the last is cut where the answer ends

    @property
    def is_right(self) -> bool:
        """The right number (arithmetic), code that parses (code), an ended answer (chat)."""
        if self.example.kind == "arithmetic":
            return final_number(self.answer) == final_number(self.example.answer)
        if self.example.kind == "code":
            return _parses(fenced_code(self.answer))
        return self.ended


def _parses(code: str | None) -> bool:
    if code is None:
        return False
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


@torch.no_grad()
def greedy(target: Qwen3ForCausalLM, prompt: list[int]) -> tuple[list[int], float]:
    """New ids up to the end token, and the smallest gap between the two best logits on the way."""
    ids, gap, past = list(prompt), float("inf"), None
    while len(ids) - len(prompt) < MAX_NEW_TOKENS:
        step = ids if past is None else ids[-1:]
        out = target(input_ids=torch.tensor([step]), past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        best = out.logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        if ids[-1] == target.config.eos_token_id:
            break
    return ids[len(prompt) :], gap


def _propose(
    draft: DFlashDraft, embedding: torch.Tensor, taps: torch.Tensor, bonus_id: int, mask_token_id: int
) -> list[int]:
    """Argmax ids of block rows 1..7 for context features of all positions below the bonus token."""
    prefix_len = taps.shape[1]
    block = torch.tensor([[bonus_id] + [mask_token_id] * (BLOCK_SIZE - 1)])
    positions = torch.arange(prefix_len + BLOCK_SIZE)[None]
    mask = torch.ones(1, 1, BLOCK_SIZE, prefix_len + BLOCK_SIZE, dtype=torch.bool)
    hidden = draft(embedding[block], taps, positions, mask)
    return (hidden[0, 1:] @ embedding.T).argmax(-1).tolist()


@torch.no_grad()
def speculative_greedy(
    target: Qwen3ForCausalLM, draft: DFlashDraft, prompt: list[int], mask_token_id: int
) -> tuple[list[int], list[int]]:
    """New ids of the DFlash loop and its accept_lens; recomputes the prefix each step, keeps no cache."""
    end, embedding = target.config.eos_token_id, target.model.embed_tokens.weight
    out = target(input_ids=torch.tensor([prompt]), output_hidden_states=True)
    ids = [*prompt, int(out.logits[0, -1].argmax())]
    taps = tap(out.hidden_states)
    accept_lens: list[int] = []
    while ids[-1] != end and len(ids) - len(prompt) < MAX_NEW_TOKENS:
        proposal = _propose(draft, embedding, taps, ids[-1], mask_token_id)
        out = target(input_ids=torch.tensor([ids + proposal]), output_hidden_states=True)
        wanted = out.logits[0, len(ids) - 1 :].argmax(-1).tolist()
        accept_len = 0
        while accept_len < len(proposal) and proposal[accept_len] == wanted[accept_len]:
            accept_len += 1
        commit = wanted[: accept_len + 1]
        if end in commit:
            commit = commit[: commit.index(end) + 1]
        ids += commit
        accept_lens.append(len(commit) - 1)
        taps = tap(out.hidden_states)[:, : len(ids) - 1]
    return ids[len(prompt) :][:MAX_NEW_TOKENS], accept_lens


def evaluate(
    target: Qwen3ForCausalLM,
    draft: DFlashDraft,
    tokenizer: PreTrainedTokenizerFast,
    heldout: list[Example],
    mask_token_id: int,
) -> list[Outcome]:
    """Decode every held-out prompt plainly and speculatively, in float32."""
    outcomes = []
    for example in heldout:
        prompt = prompt_ids(tokenizer, example.prompt)
        plain, gap = greedy(target, prompt)
        ids, accept_lens = speculative_greedy(target, draft, prompt, mask_token_id)
        ended = plain[-1] == target.config.eos_token_id
        answer = tokenizer.decode(plain[:-1] if ended else plain)
        outcomes.append(Outcome(example, answer, len(plain), ended, ids == plain, gap, tuple(accept_lens)))
    return outcomes

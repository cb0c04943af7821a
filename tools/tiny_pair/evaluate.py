"""Measures the pair on held-out prompts: right answers, tau, equality with plain greedy decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sglang_dflash.reference import DFlashDraftModel
from tools.tiny_pair.grade import has_ended, is_right
from tools.tiny_pair.wording import Example

MAX_NEW_TOKENS = 200
_TOGETHER = 50
_TALKS = 90  # number of multi-turn conversations


@dataclass(frozen=True, slots=True)
class Outcome:
    """One held-out prompt decoded with the draft."""

    kind: str
    new_tokens: int
    right: bool
    ended: bool
    greedy: bool  # every id is the argmax of one plain pass over prompt and answer
    least_gap: float  # smallest top-1 minus top-2 logit of the answer
    accept_lens: tuple[int, ...]  # one per verify step


@torch.inference_mode()
def _greedy_path(target: PreTrainedModel, prompt: list[int], ids: list[int]) -> tuple[bool, float]:
    logits = target(input_ids=torch.tensor([prompt + ids[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    gap = float((best.values[:, 0] - best.values[:, 1]).min())
    return best.indices[:, 0].tolist() == ids, gap


def _answers(
    target: PreTrainedModel, draft: DFlashDraftModel, prompts: Sequence[list[int]]
) -> Iterator[tuple[list[int], list[int]]]:
    """(new ids, commit_lens) of every prompt, decoded in batches of _TOGETHER."""
    for start in range(0, len(prompts), _TOGETHER):
        some = prompts[start : start + _TOGETHER]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in some], batch_first=True)
        real = torch.arange(ids.shape[1]) < torch.tensor([len(prompt) for prompt in some])[:, None]
        done = draft.spec_generate(target, ids, MAX_NEW_TOKENS, attention_mask=real.long(), return_stats=True)
        yield from ((done.new_ids(i), done.commit_lens[i]) for i in range(len(some)))


def _chat(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def evaluate(
    target: PreTrainedModel, draft: DFlashDraftModel, tokenizer: PreTrainedTokenizerFast, heldout: Sequence[Example]
) -> list[Outcome]:
    """Decodes every held-out prompt with the reference's `spec_generate`, in the models' own dtype."""
    prompts = [_chat(tokenizer, [{"role": "user", "content": example.prompt}]) for example in heldout]
    outcomes = []
    answers = _answers(target, draft, prompts)
    for example, prompt, (ids, commit_lens) in zip(heldout, prompts, answers, strict=True):
        ended = has_ended(ids, target.config.eos_token_id)
        text = tokenizer.decode(ids[:-1] if ended else ids)
        greedy, gap = _greedy_path(target, prompt, ids)
        outcomes.append(
            Outcome(
                example.kind,
                len(ids),
                is_right(example.kind, example.answer, text, ended),
                ended,
                greedy,
                gap,
                tuple(commit_len - 1 for commit_len in commit_lens),
            )
        )
    return outcomes


def later_turns(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerFast,
    heldout: Sequence[Example],
    turns: int,
) -> list[list[int]]:
    """accept_lens by turn, over conversations of `turns` held-out prompts; each turn has equally many of each kind."""
    kinds = list(dict.fromkeys(example.kind for example in heldout))
    prompts = [[example.prompt for example in heldout if example.kind == kind] for kind in kinds]
    asked = []
    for talk in range(_TALKS):
        kind_of = [prompts[(talk + turn) % len(kinds)] for turn in range(turns)]
        asked.append([some[(talk * turns + turn) % len(some)] for turn, some in enumerate(kind_of)])
    said: list[list[dict[str, str]]] = [[] for _ in asked]
    found: list[list[int]] = []
    for turn in range(turns):
        for messages, questions in zip(said, asked, strict=True):
            messages.append({"role": "user", "content": questions[turn]})
        answers = list(_answers(target, draft, [_chat(tokenizer, messages) for messages in said]))
        found.append([commit_len - 1 for _, commit_lens in answers for commit_len in commit_lens])
        for messages, (ids, _) in zip(said, answers, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
    return found

"""Measures the pair on held-out prompts: right answers, tau, equality with plain greedy decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sglang_dflash.reference import DFlashDraftModel
from tools.tiny_pair.conversations import Conversation, Message, pair_of
from tools.tiny_pair.grade import has_ended, is_right
from tools.tiny_pair.shapes import MAX_POSITIONS
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


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """One turn of several conversations; `expected`: answers that equal the script's."""

    accept_lens: tuple[int, ...]  # one per verify step
    answers: int
    expected: int


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


def heldout_talks(heldout: Sequence[Example], turns: int) -> list[Conversation]:
    """Conversations of `turns` held-out prompts; each turn has equally many of each kind."""
    kinds = list(dict.fromkeys(example.kind for example in heldout))
    by_kind = [[example for example in heldout if example.kind == kind] for kind in kinds]
    talks = []
    for talk in range(_TALKS):
        some = [by_kind[(talk + turn) % len(kinds)] for turn in range(turns)]
        asked = [examples[(talk * turns + turn) % len(examples)] for turn, examples in enumerate(some)]
        messages = [message for example in asked for message in pair_of(example)]
        talks.append(Conversation(messages, [example.kind for example in asked]))
    return talks


def _asked(talk: Conversation) -> list[list[Message]]:
    """The messages before each of the assistant's, turn by turn."""
    asked: list[list[Message]] = [[]]
    for message in talk.messages:
        if message["role"] == "assistant":
            asked.append([])
        else:
            asked[-1].append(message)
    return asked


def turn_by_turn(
    target: PreTrainedModel,
    draft: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerFast,
    talks: Sequence[Conversation],
) -> list[TurnOutcome]:
    """What the turns of the conversations got, where the target's own answers stand between the user's messages.

    A conversation ends where an answer of MAX_NEW_TOKENS might not fit.
    """
    going = [(list[Message](), _asked(talk), talk.answers()) for talk in talks]
    found = []
    for turn in range(max((len(talk.kinds) for talk in talks), default=0)):
        going = [(said + asked[turn], asked, answers) for said, asked, answers in going if turn < len(answers)]
        going = [one for one in going if len(_chat(tokenizer, one[0])) <= MAX_POSITIONS - MAX_NEW_TOKENS]
        accept_lens: list[int] = []
        expected = 0
        done = _answers(target, draft, [_chat(tokenizer, said) for said, _, _ in going])
        for (said, _, answers), (ids, commit_lens) in zip(going, done, strict=True):
            accept_lens += [commit_len - 1 for commit_len in commit_lens]
            said.append({"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)})
            expected += said[-1]["content"] == answers[turn]
        found.append(TurnOutcome(tuple(accept_lens), len(going), expected))
    return found

"""Held-out acceptance against the decode loop itself, on the target's own answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sglang_dflash.reference import spec_generate
from sglang_dflash.serving import TINY_TARGET, held_out_prompts
from sglang_dflash.training.evaluation import Acceptance, accept_lens, held_out_acceptance
from sglang_dflash.training.frozen import FrozenTarget

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def frozen() -> FrozenTarget:
    return FrozenTarget(str(TINY_TARGET), "float32", CPU)


def test_acceptance_by_hand():
    """Fails if tau leaves out the target's own token, or a share is not of all steps."""
    acceptance = Acceptance((5, 3, 0, 2))
    assert acceptance.tau == pytest.approx(1 + (3 * 1 + 2 * 3) / 10)
    assert acceptance.by_position == pytest.approx([0.5, 0.2, 0.2])
    assert Acceptance((0, 0, 0)).tau == 0.0
    assert Acceptance((0, 0, 0)).by_position == [0.0, 0.0]


def _answered(draft: Any, frozen: FrozenTarget, prompt: list[int], max_new_tokens: int) -> tuple[dict, list[int]]:
    """A sample of the target's greedy answer, and the accept_lens that decoding reported for it.

    Decoding gets the first token from the prefill and drafts from there. So does the held-out walk: its first block is
    at the answer's first token. Both stop once the end token is committed. Decoding's last step also counts what it
    commits after the end; the walk counts no draft after it, so the last accept_len is capped here.
    """
    out = spec_generate(
        draft, frozen.model, torch.tensor([prompt]), max_new_tokens, sorted(frozen.end_ids), return_stats=True
    )
    answer = out.new_ids(0)
    lens = [commit_len - 1 for commit_len in out.commit_lens[0]]
    if lens:
        left = len(answer) - 1 - sum(commit_len for commit_len in out.commit_lens[0][:-1])
        lens[-1] = min(lens[-1], left)
    return {"input_ids": prompt + answer, "spans": [[len(prompt), len(prompt) + len(answer)]]}, lens


def _held_out(draft: Any, frozen: FrozenTarget, samples: list[dict[str, Any]]) -> Acceptance:
    return held_out_acceptance(draft, frozen, samples, lambda _, ids: frozen.features(ids, draft.target_layer_ids), CPU)


def _prompts(tokenizer: Any, per_kind: int) -> list[list[int]]:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.prompt}], add_generation_prompt=True, tokenize=False
        )
        for kind in ("arithmetic", "chat", "code")
        for p in held_out_prompts(kind)[:per_kind]
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_every_step_is_the_one_that_decoding_takes(draft, frozen, tokenizer):
    """Fails if a step on the target's own greedy answers accepts another number of drafts than decoding does, or if
    steps are missing or added. Some answers end at the limit, not at an end token."""
    samples, expected, lengths = [], Counter(), set()
    for number, prompt in enumerate(_prompts(tokenizer, 2)):
        sample, lens = _answered(draft, frozen, prompt, 11 if number % 2 else 100)
        ((start, end),) = sample["spans"]
        ids = torch.tensor([sample["input_ids"]])
        features = frozen.features(ids, draft.target_layer_ids)
        of_all = accept_lens(draft, frozen, ids, features, torch.arange(start, end - 1), end)
        walked, anchor = [], start
        while anchor < end - 1:
            walked.append(of_all[anchor - start])
            anchor += walked[-1] + 1
        assert walked == lens, prompt
        samples.append(sample)
        expected.update(lens)
        lengths.add(sample["input_ids"][-1] in frozen.end_ids)
    assert lengths == {True, False}
    found = _held_out(draft, frozen, samples)
    assert found.steps == tuple(expected[n] for n in range(draft.block_size))
    # The comparison must include both right and wrong drafts.
    assert sum(found.steps) > 20 and found.steps[0] and found.steps[-1] and found.tau > 2


def test_every_answer_of_a_conversation_counts(draft, frozen, tokenizer):
    """Fails if only the first answer is walked, or the second one without the conversation before it."""
    question = tokenizer("<|im_start|>user\nCompute 7 + 5.<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    first, lens = _answered(draft, frozen, question, 60)
    again = tokenizer("\n<|im_start|>user\nCompute 9 + 5.<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    second, more = _answered(draft, frozen, first["input_ids"] + again, 60)
    talk = {"input_ids": second["input_ids"], "spans": first["spans"] + second["spans"]}
    assert lens and more
    steps = Counter(lens + more)
    assert _held_out(draft, frozen, [talk]).steps == tuple(steps[n] for n in range(draft.block_size))


def test_more_blocks_than_run_at_a_time(draft, frozen, tokenizer, monkeypatch):
    """Fails if the result for a long answer depends on how many blocks run together."""
    sample, _ = _answered(draft, frozen, _prompts(tokenizer, 1)[0], 40)
    ((start, end),) = sample["spans"]
    ids = torch.tensor([sample["input_ids"]])
    features = frozen.features(ids, draft.target_layer_ids)
    arguments = (draft, frozen, ids, features, torch.arange(start, end - 1), end)
    together = accept_lens(*arguments)
    monkeypatch.setattr("sglang_dflash.training.evaluation._BLOCKS_AT_ONCE", 3)
    assert accept_lens(*arguments) == together


def test_an_answer_of_one_token_has_no_step(draft, frozen):
    """Fails if a step is counted that decoding does not take: the prefill gives the only token."""
    assert _held_out(draft, frozen, [{"input_ids": [5, 6, 7], "spans": [[2, 3]]}]).steps == (0,) * 8


def test_evaluation_leaves_the_draft_as_it_was(draft, frozen):
    """Fails if an evaluation changes weights, gradients or the training mode."""
    before = {name: weight.clone() for name, weight in draft.named_parameters()}
    draft.train()
    _held_out(draft, frozen, [{"input_ids": [5, 6, 7, 8, 9], "spans": [[1, 5]]}])
    assert draft.training
    assert all(torch.equal(before[name], weight) and weight.grad is None for name, weight in draft.named_parameters())
    draft.eval()

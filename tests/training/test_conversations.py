"""Conversations as ids and spans, every form and every refusal, and the order in which a run sees them."""

from __future__ import annotations

import copy
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from sglang_dflash.training.conversations import (
    collate,
    epoch_batches,
    lengths,
    messages_of,
    micro_batches,
    read,
    tokenize,
    trim,
)

ASKED = {"role": "user", "content": "Compute 9 * 7."}
SAID = {"role": "assistant", "content": "First: 9 * 7 = 63.\nThe answer is 63."}
AGAIN = {"role": "user", "content": "And 2 more?"}
SAID_AGAIN = {"role": "assistant", "content": "Then: 63 + 2 = 65."}
# Cuts the thoughts out of every turn but the last, as the templates of thinking models do.
CUTTING = (
    "{%- for message in messages %}{%- set content = message['content'] %}"
    "{%- if not loop.last and '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ASKED, SAID], "id": 3}, [ASKED, SAID]),
        ({"messages": [_turn("system", "Be brief."), ASKED]}, [_turn("system", "Be brief."), ASKED]),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
            [_turn("user", "Hi"), _turn("assistant", "Hello")],
        ),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}]},
            [_turn("system", "Be brief."), _turn("user", "Hi")],
        ),
        ({"prompt": "Hi", "response": "Hello"}, [_turn("user", "Hi"), _turn("assistant", "Hello")]),
        ({"prompt": "Hi", "response": ""}, [_turn("user", "Hi"), _turn("assistant", "")]),
        ({"prompt": "Hi"}, [_turn("user", "Hi")]),
        ({"messages": None, "conversations": None, "prompt": "Hi", "response": None}, [_turn("user", "Hi")]),
    ],
)
def test_every_form_is_read(row, expected):
    """Fails where one of the forms in use is not read, or a role or a turn gets lost."""
    assert messages_of(row) == expected


WRONG = [
    ({"text": "Hi"}, "it has the keys ['text']; it must have \"messages\""),
    ({"messages": []}, "it must have"),
    ({"messages": "Hi"}, "list of objects"),
    ({"messages": ["Hi", "Hello"]}, "list of objects"),
    ({"messages": [{"role": "user"}]}, "role and a content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, "role and a content"),
    ({"conversations": [{"from": "human"}]}, "role and a content"),
    ({"prompt": 5}, "role and a content"),
    ({"prompt": "Hi", "response": 5}, "role and a content"),
    ({"input_ids": [1, 2, 3], "spans": [[1, 9]]}, "within its 3 input_ids"),
    ({"input_ids": [1, 2, 3], "spans": [[2, 1]]}, "within its 3 input_ids"),
    ({"input_ids": [1, 2, 3], "spans": [[1]]}, "within its 3 input_ids"),
]


def _write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _read(paths: str | list[str], tokenizer: Any, end_ids: set[int], max_length: int = 3072) -> list[dict[str, Any]]:
    return list(read([paths] if isinstance(paths, str) else paths, tokenizer, end_ids, max_length, {}))


@pytest.mark.parametrize(("row", "said"), WRONG)
def test_a_wrong_row_is_refused_with_its_place(row, said, tokenizer, end_ids, tmp_path):
    """Fails where a conversation of no use is skipped, ends in another error than one sentence, or is not named."""
    good = [{"prompt": "Hi", "response": "Hello"}] * 2 if "prompt" not in row else [{"messages": [ASKED, SAID]}] * 2
    path = _write(tmp_path / "data.jsonl", [*good, row])
    with pytest.raises(ValueError) as refused:
        _read(path, tokenizer, end_ids)
    sentence = str(refused.value)
    assert sentence.startswith(f"{path}, conversation 3: ") and said in sentence
    assert "\n" not in sentence and sentence.endswith(".")


@pytest.mark.parametrize(
    "text", ["{'messages': 3}\n", '{"prompt": "Hi"\n', "", "Hi\n"], ids=["python", "cut", "empty", "text"]
)
def test_no_jsonl_is_refused(text, tokenizer, end_ids, tmp_path):
    """Fails where a file that holds no JSON lines ends in a traceback of the reader."""
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        _read(str(path), tokenizer, end_ids)
    assert str(refused.value).startswith(f"{path} cannot be read as JSONL: ")
    assert "\n" not in str(refused.value)


def test_nothing_to_learn_is_refused(tokenizer, end_ids, tmp_path):
    """Fails where a run would start without one answer."""
    path = _write(tmp_path / "data.jsonl", [{"messages": [ASKED]}, {"prompt": "Hi"}])
    with pytest.raises(ValueError, match="holds nothing to learn"):
        _read(path, tokenizer, end_ids)


def test_a_template_that_refuses_is_named(tokenizer, end_ids, tmp_path):
    """Fails where the template's own complaint ends in a traceback, or loses its conversation."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('Roles must alternate.') }}"
    path = _write(tmp_path / "data.jsonl", [{"messages": [ASKED, SAID]}])
    with pytest.raises(ValueError, match="conversation 1: the chat template refuses it: Roles must alternate"):
        _read(path, strict, end_ids)


def test_all_forms_in_one_file_and_over_several(tokenizer, end_ids, tmp_path):
    """Fails where forms cannot be mixed, ids of one's own are tokenized again, or a file is left out."""
    own = {"messages": [ASKED, SAID], "input_ids": [5, 6, 7, 8], "spans": [[1, 4]]}
    rows = [{"messages": [ASKED, SAID]}, {"prompt": ASKED["content"], "response": SAID["content"]}, own]
    first = _write(tmp_path / "first.jsonl", rows)
    samples = _read([first, _write(tmp_path / "second.jsonl", rows)], tokenizer, end_ids)
    assert len(samples) == 6 and samples[:3] == samples[3:]
    assert samples[0] == samples[1]
    assert samples[2] == {"input_ids": [5, 6, 7, 8], "spans": [[1, 4]]}


def _said(tokenizer: Any, sample: dict[str, Any]) -> list[str]:
    return [tokenizer.decode(sample["input_ids"][start:end]) for start, end in sample["spans"]]


def test_spans_are_what_the_target_said(tokenizer, end_ids):
    """Fails where a span begins in the prompt, misses the first token or the end token, or runs on behind it."""
    (sample,) = tokenize(tokenizer, [ASKED, SAID], end_ids)
    assert _said(tokenizer, sample) == [SAID["content"] + "<|im_end|>"]
    ((start, end),) = sample["spans"]
    prompt = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(sample["input_ids"][:start]) == prompt
    assert tokenizer.decode(sample["input_ids"][end:]) == "\n"


def test_all_turns_of_a_conversation_are_one_sample(tokenizer, end_ids):
    """Fails where turns are torn apart, or what the user says in between is learned."""
    talk = [_turn("system", "Be brief."), ASKED, SAID, AGAIN, SAID_AGAIN]
    (sample,) = tokenize(tokenizer, talk, end_ids)
    assert _said(tokenizer, sample) == [SAID["content"] + "<|im_end|>", SAID_AGAIN["content"] + "<|im_end|>"]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    assert tokenizer.decode(sample["input_ids"]) == whole


def test_what_nobody_answered_is_no_sample(tokenizer, end_ids):
    """Fails where a conversation without an answer becomes a sample, or a last question hides the answers before it."""
    assert tokenize(tokenizer, [ASKED], end_ids) == []
    (sample,) = tokenize(tokenizer, [ASKED, SAID, AGAIN], end_ids)
    assert _said(tokenizer, sample) == [SAID["content"] + "<|im_end|>"]


def test_a_template_that_rewrites_gives_a_sample_for_each_turn(tokenizer, end_ids):
    """Fails where an earlier turn's thoughts, which the target does not see any more, stand before a later answer, or
    where they are not learned in the turn in which the target had them."""
    cutting = copy.deepcopy(tokenizer)
    cutting.chat_template = CUTTING
    thinking = _turn("assistant", "<think>9 * 7 is 63.</think>The answer is 63.")
    later = _turn("assistant", "<think>Add them.</think>The answer is 65.")
    first, second = tokenize(cutting, [ASKED, thinking, AGAIN, later], end_ids)
    assert _said(cutting, first) == [thinking["content"] + "<|im_end|>"]
    assert _said(cutting, second) == [later["content"] + "<|im_end|>"]
    asked = cutting.decode(second["input_ids"][: second["spans"][0][0]])
    assert "<think>" not in asked and "The answer is 63." in asked and AGAIN["content"] in asked
    (merged,) = tokenize(cutting, [ASKED, SAID, AGAIN, SAID_AGAIN], end_ids)
    assert len(merged["spans"]) == 2


def test_template_arguments_reach_the_template(tokenizer, end_ids):
    """Fails where --chat-template-kwargs change nothing."""
    asking = copy.deepcopy(tokenizer)
    asking.chat_template = "{{ mood }}" + CUTTING
    (sample,) = tokenize(asking, [ASKED, SAID], end_ids, mood="Gladly. ")
    assert asking.decode(sample["input_ids"]).startswith("Gladly. <|im_start|>user")


def test_trim():
    """Fails where a cut answer keeps a label beyond the cut, or a rest of one token counts as something to learn."""
    sample = {"input_ids": list(range(20)), "spans": [[2, 6], [9, 15]]}
    assert trim(sample, 50) == sample
    assert trim(sample, 15) == {"input_ids": list(range(15)), "spans": [[2, 6], [9, 15]]}
    assert trim(sample, 11) == {"input_ids": list(range(11)), "spans": [[2, 6], [9, 11]]}
    assert trim(sample, 10) == {"input_ids": list(range(10)), "spans": [[2, 6]]}
    assert trim(sample, 4) == {"input_ids": list(range(4)), "spans": [[2, 4]]}
    assert trim(sample, 3) is None


def test_long_conversations_are_cut(tokenizer, end_ids, tmp_path):
    """Fails where --max-length does not hold, or a conversation of which nothing is left stays."""
    long = {"messages": [_turn("user", "Compute 9 * 7. " * 40), SAID]}
    path = _write(tmp_path / "data.jsonl", [long, {"messages": [ASKED, SAID]}])
    whole = _read(path, tokenizer, end_ids)
    cut = _read(path, tokenizer, end_ids, max_length=25)
    assert [len(sample["input_ids"]) > 25 for sample in whole] == [True, True]
    assert [len(sample["input_ids"]) for sample in cut] == [25]


def test_collate():
    """Fails where padding is learned, or a span is off by one."""
    samples = [{"input_ids": [7, 8, 9, 10], "spans": [[1, 2], [3, 4]]}, {"input_ids": [5, 6], "spans": [[0, 2]]}]
    ids, learned = collate(samples, torch.device("cpu"))
    assert ids.tolist() == [[7, 8, 9, 10], [5, 6, 0, 0]] and ids.dtype == torch.int64
    assert learned.int().tolist() == [[0, 1, 0, 1], [1, 1, 0, 0]]


LENGTHS = [(37 * i) % 101 + 10 for i in range(150)]


@pytest.mark.parametrize("batch_size", [1, 4, 200])
def test_an_epoch_holds_everything_once(batch_size):
    """Fails where a conversation is left out or comes twice, or a batch is larger than asked."""
    batches = epoch_batches(LENGTHS, batch_size, seed=0, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(150))
    assert {len(batch) for batch in batches} <= set(range(1, batch_size + 1))
    assert len(batches) == -(-150 // batch_size)


def test_the_order_of_an_epoch():
    """Fails where the same seed gives another order, another seed or epoch the same, or batches come by length."""
    order = epoch_batches(LENGTHS, 4, seed=0, epoch=0)
    assert order == epoch_batches(LENGTHS, 4, seed=0, epoch=0)
    assert order != epoch_batches(LENGTHS, 4, seed=0, epoch=1)
    assert order != epoch_batches(LENGTHS, 4, seed=1, epoch=0)
    means = [sum(LENGTHS[index] for index in batch) / len(batch) for batch in order]
    assert means != sorted(means)
    spread = [max(LENGTHS[i] for i in batch) - min(LENGTHS[i] for i in batch) for batch in order]
    assert sum(spread) / len(spread) < 10


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 4), (2, 4), (3, 1), (4, 7)])
def test_processes_see_different_conversations(ranks, batch_size):
    """Fails where two processes learn the same in one epoch, or one has a batch more than another, and waits."""
    count = -(-150 // batch_size) // ranks
    mine = [list(islice(micro_batches(LENGTHS, batch_size, 0, rank, ranks, 0), count)) for rank in range(ranks)]
    seen = [index for batches in mine for batch in batches for index in batch]
    assert len(seen) == len(set(seen))
    assert len(seen) > 150 - ranks * batch_size
    first = [next(islice(micro_batches(LENGTHS, batch_size, 0, rank, ranks, count), 1)) for rank in range(ranks)]
    assert first == [epoch_batches(LENGTHS, batch_size, 0, 1)[rank] for rank in range(ranks)]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("start", [0, 1, 11, 12, 13, 37, 38, 39, 100])
def test_starting_late_goes_on_where_it_was(start, rank, ranks):
    """Fails where a resumed run sees other batches than the unbroken one, at the border of an epoch or behind it."""
    unbroken = list(islice(micro_batches(LENGTHS, 4, 5, rank, ranks, 0), start + 20))
    assert list(islice(micro_batches(LENGTHS, 4, 5, rank, ranks, start), 20)) == unbroken[start:]


def test_fewer_batches_than_processes():
    """Fails where a process has nothing to do and the others wait for it."""
    batches = [next(micro_batches([5, 6], 2, 0, rank, 3, 0)) for rank in range(3)]
    assert [sorted(batch) for batch in batches] == [[0, 1]] * 3


def test_words_before_any_question_are_left_out():
    """Fails where a ShareGPT row that opens with the assistant stops a run, or teaches an answer to nothing."""
    row = {"conversations": [{"from": "gpt", "value": "Hello!"}, {"from": "human", "value": "1 + 1?"}]}
    assert messages_of(row) == [{"role": "user", "content": "1 + 1?"}]
    with pytest.raises(ValueError, match="no user's turn"):
        messages_of({"messages": [{"role": "assistant", "content": "Hello!"}]})


def test_lengths_and_padding():
    """Fails where a length is another sample's after a shuffle, or flex attention meets other shapes than asked."""
    data = Dataset.from_dict({"input_ids": [[1], [1, 2, 3], [1, 2]], "spans": [[[0, 1]]] * 3})
    assert lengths(data) == [1, 3, 2]
    assert lengths(data.select([2, 0])) == [2, 1]
    ids, learned = collate([data[1]], torch.device("cpu"), multiple=8)
    assert ids.tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]] and learned.sum() == 1


def test_many_conversations_are_tokenized_by_several_processes(tmp_path, tokenizer, end_ids, monkeypatch):
    """Fails where the work of several processes is another than that of one, or in another order."""
    path = _write(tmp_path / "many.jsonl", [{"prompt": f"{i} + 1?", "response": f"It is {i + 1}."} for i in range(50)])
    alone = _read(path, tokenizer, end_ids)
    monkeypatch.setattr("sglang_dflash.training.conversations._MANY", 10)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert _read(path, tokenizer, end_ids) == alone

"""Conversations as ids and spans, every form and every refusal, and the order of the batches."""

from __future__ import annotations

import copy
import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from sglang_dflash.serving.messages import messages_of
from sglang_dflash.training.conversations import (
    collate,
    epoch_batches,
    lengths,
    micro_batches,
    read,
    tokenize,
    trim,
)

ASKED = {"role": "user", "content": "Compute 9 * 7."}
SAID = {"role": "assistant", "content": "First: 9 * 7 = 63.\nThe answer is 63."}
AGAIN = {"role": "user", "content": "And 2 more?"}
SAID_AGAIN = {"role": "assistant", "content": "Then: 63 + 2 = 65."}
# Cuts the thoughts out of all turns but the last, like the templates of thinking models.
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
        ({"id": "a", "conversations": [ASKED, SAID]}, [ASKED, SAID]),  # SpecForge, speculators
        ({"conversation_id": "a", "conversation": [ASKED, SAID]}, [ASKED, SAID]),  # LMSYS, WildChat
        ({"messages": [{"from": "human", "value": "Hi"}, SAID]}, [_turn("user", "Hi"), SAID]),
        ({"messages": [{**ASKED, "from": None, "value": None, "weight": 1}, SAID]}, [ASKED, SAID]),
        (
            {"conversations": [{"from": "user", "value": "Hi"}, {"from": "chatgpt", "value": "Hello"}]},
            [_turn("user", "Hi"), _turn("assistant", "Hello")],
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "observation", "value": "63"}]},
            [_turn("user", "Hi"), _turn("tool", "63")],
        ),
        (
            {"messages": [_turn("User", "Hi"), _turn("Assistant", "Hello")]},
            [_turn("user", "Hi"), _turn("assistant", "Hello")],
        ),
        ({"prompt": [ASKED], "completion": [SAID]}, [ASKED, SAID]),  # TRL
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, [_turn("user", "Hi")]),
        (
            {"conversations": [ASKED, {**SAID, "thinking": "9 times 7."}]},
            [ASKED, {**SAID, "reasoning_content": "9 times 7."}],
        ),
        ({"system": "Be brief.", "conversations": [ASKED]}, [_turn("system", "Be brief."), ASKED]),
        (
            {"system": "Be brief.", "messages": [_turn("system", "Be brief."), ASKED]},
            [_turn("system", "Be brief."), ASKED],
        ),
        ({"prompt": json.loads('"a \\ud83d\\ude00 b"')}, [_turn("user", "a \U0001f600 b")]),
    ],
)
def test_every_form_is_read(row, expected):
    """Fails if one of the forms is not read, or a role or a turn is lost."""
    assert messages_of(row) == expected


WRONG = [
    ({"text": "Hi"}, "it has the keys ['text']; it must have \"messages\""),
    ({"messages": []}, "it must have"),
    ({"messages": "Hi"}, "list of objects"),
    ({"messages": ["Hi", "Hello"]}, "list of objects"),
    ({"conversations": '[{"role": "user"}]'}, "its conversations must be a list of objects"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is None; it must be text"),
    ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "messages[1].content is None; it must be text"),
    (
        {"messages": [ASKED, {"role": "model", "content": "63"}]},
        "messages[1].role is 'model'; it must be one of system, ",
    ),
    ({"messages": [{"content": "63"}]}, "messages[0].role is None; it must be one of system, "),
    ({"messages": [{"role": ["user"], "content": "63"}]}, "messages[0].role is ['user']; it must be one of system, "),
    (
        {"conversations": [{"from": "function_call", "value": "{}"}]},
        "conversations[0].from is 'function_call'; it must",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 2}]},
        "messages[0].content is [{'type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content is [{'type': 'image_"),
    ({"conversations": [{"from": "human"}]}, "conversations[0].content is None; it must be text"),
    ({"conversations": [{"from": "human", "value": 5}]}, "conversations[0].value is 5; it must be text"),
    ({"prompt": 5}, "its prompt is 5; it must be text"),
    ({"prompt": []}, "its prompt is []; it must be text"),
    ({"prompt": "Hi", "response": 5}, "its response is 5; it must be text"),
    ({"prompt": "Hi", "completion": "Hello"}, "it has `prompt` and `completion`; if this is a chat's answer, name"),
    ({"system": 5, "messages": [ASKED, SAID]}, "its system is 5; it must be text"),
    ({"system": "A", "messages": [_turn("system", "B"), ASKED]}, "both `system` and messages[0], which is another"),
    (
        {"messages": [ASKED, _turn("assistant", "a \ud83d b")]},
        "messages[1].content has half a character, \\ud83d, behind",
    ),
    ({"conversations": [{"from": "human", "value": "\udc00"}]}, "conversations[0].value has half a character, \\udc00"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]},
        "messages[0].content[0].text has",
    ),
    ({"prompt": "Hi", "response": "a \ud83d"}, "response has half a character, \\ud83d, behind its first 2 characters"),
    ({"system": "\ud83d", "prompt": "Hi"}, "system has half a character"),
    ({"messages": [{**ASKED, "\ud83d": 3}]}, "a key in messages[0] has half a character"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "a list of 0 and 1, one for each of its 3 input_ids"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, "a list of 0 and 1, one for each of its 3 input_ids"),
    ({"input_ids": [1, 2, 3], "spans": [[1, 9]]}, "within its 3 input_ids"),
    ({"input_ids": [1, 2, 3], "spans": [[2, 1]]}, "within its 3 input_ids"),
    ({"input_ids": [1, 2, 3], "spans": [[1]]}, "within its 3 input_ids"),
    ({"input_ids": [1, 2, 3], "spans": [["1", 3]]}, "within its 3 input_ids"),
    ({"input_ids": [1, 2.5, 3], "spans": [[1, 3]]}, "a list of token ids"),
]


def _write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _read(paths: str | list[str], tokenizer: Any, end_ids: set[int], max_length: int = 3072) -> list[dict[str, Any]]:
    return list(read([paths] if isinstance(paths, str) else paths, tokenizer, end_ids, max_length, {}))


@pytest.mark.parametrize(("row", "said"), WRONG)
def test_a_wrong_row_is_refused_with_its_place(row, said, tokenizer, end_ids, tmp_path):
    """Fails if a wrong conversation is skipped, or the error is not one sentence that names the line."""
    good = [{"prompt": "Hi", "response": "Hello"}] * 2 if "prompt" not in row else [{"messages": [ASKED, SAID]}] * 2
    path = _write(tmp_path / "data.jsonl", [*good, row])
    with pytest.raises(ValueError) as refused:
        _read(path, tokenizer, end_ids)
    sentence = str(refused.value)
    assert sentence.startswith(f"{path}, line 3: ") and said in sentence
    assert "\n" not in sentence and sentence.endswith(".")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{'messages': 3}\n", ", line 1: it is not valid JSON: "),
        (b'{"prompt": "Hi"\n', ", line 1: it is not valid JSON: "),
        (b"Hi\n", ", line 1: it is not valid JSON: "),
        (b"[1]\n", ", item 1: it must be a JSON object."),
        (b'[{"prompt": "Hi"}\n', " begins as one JSON document, which is not valid: "),
        (b"", " holds no conversation: there are no lines."),
        (b"\n \n", " holds no conversation: there are no lines."),
        (b"\xff\xfe\n", ", line 1: it is not UTF-8 text: "),
        (b'{"prompt": "Hi", "response": "Hello"}\n' * 2000 + b"\xff\n", ", line 2001: it is not UTF-8 text: "),
        (b"PAR1\x15\x04", " is a Parquet file; it must be JSONL."),
        (gzip.compress(b'{"prompt": "Hi"}\n', mtime=0)[:-9], " cannot be read: "),
    ],
    ids=["python", "cut", "text", "list", "cut list", "empty", "blank", "bytes", "late bytes", "parquet", "cut gzip"],
)
def test_no_jsonl_is_refused(content, said, tokenizer, end_ids, tmp_path):
    """Fails if a file without JSON lines gives a traceback of the reader."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        _read(str(path), tokenizer, end_ids)
    assert str(refused.value).startswith(f"{path}{said}")
    assert "\n" not in str(refused.value)


def test_a_line_is_what_ends_with_a_newline(tokenizer, end_ids, tmp_path):
    """Fails if a separator within a text ends a line, or an empty line is refused or not counted."""
    path = tmp_path / "data.jsonl"
    row = json.dumps({"prompt": "Hi\u2028there\x85", "response": "Hello"}, ensure_ascii=False)
    path.write_text(f"{row}\n\n{row}\n", encoding="utf-8")
    first, second = _read(str(path), tokenizer, end_ids)
    assert first == second and "\u2028" in tokenizer.decode(first["input_ids"])
    path.write_text(f"{row}\n\n{{}}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 3: "):
        _read(str(path), tokenizer, end_ids)


def test_nothing_to_learn_is_refused(tokenizer, end_ids, tmp_path):
    """Fails if a run can start without any answer."""
    path = _write(tmp_path / "data.jsonl", [{"messages": [ASKED]}, {"prompt": "Hi"}])
    with pytest.raises(ValueError, match="holds nothing to learn"):
        _read(path, tokenizer, end_ids)


def test_a_template_that_refuses_is_named(tokenizer, end_ids, tmp_path):
    """Fails if the template's error gives a traceback, or a message that does not name the line."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('Roles must alternate.') }}"
    path = _write(tmp_path / "data.jsonl", [{"messages": [ASKED, SAID]}])
    with pytest.raises(ValueError, match="line 1: the chat template refuses it: Roles must alternate"):
        _read(path, strict, end_ids)


def test_all_forms_in_one_file_and_over_several(tokenizer, end_ids, tmp_path):
    """Fails if forms cannot be mixed, given ids are tokenized again, or a file is left out."""
    own = {"messages": [ASKED, SAID], "input_ids": [5, 6, 7, 8], "spans": [[1, 4]]}
    masked = {"conversations": [ASKED, SAID], "input_ids": [5, 6, 7, 8, 9, 5], "loss_mask": [1, 1, 0, 1, 1, 1]}
    rows = [{"messages": [ASKED, SAID]}, {"prompt": ASKED["content"], "response": SAID["content"]}, own, masked]
    first = _write(tmp_path / "first.jsonl", rows)
    samples = _read([first, _write(tmp_path / "second.jsonl", rows)], tokenizer, end_ids)
    assert len(samples) == 8 and samples[:4] == samples[4:]
    assert samples[0] == samples[1]
    assert samples[2] == {"input_ids": [5, 6, 7, 8], "spans": [[1, 4]]}
    assert samples[3] == {"input_ids": [5, 6, 7, 8, 9, 5], "spans": [[0, 2], [3, 6]]}


def test_a_changed_file_is_read_again(tokenizer, end_ids, tmp_path):
    """Fails where a file gives the samples that it held before, or a name of its folder is taken as a pattern."""
    path = tmp_path / "data[1].jsonl"
    asked = {"prompt": "Hi", "response": "Hello"}
    first = _read(_write(path, [asked]), tokenizer, end_ids)
    assert _read(_write(path, [{**asked, "response": "Hullo"}]), tokenizer, end_ids) != first  # of the same size
    assert len(_read(_write(path, [asked] * 2), tokenizer, end_ids)) == 2


def _said(tokenizer: Any, sample: dict[str, Any]) -> list[str]:
    return [tokenizer.decode(sample["input_ids"][start:end]) for start, end in sample["spans"]]


def test_spans_are_what_the_target_said(tokenizer, end_ids):
    """Fails if a span begins in the prompt, misses the first token or the end token, or runs past the end token."""
    (sample,) = tokenize(tokenizer, [ASKED, SAID], end_ids)
    assert _said(tokenizer, sample) == [SAID["content"] + "<|im_end|>"]
    ((start, end),) = sample["spans"]
    prompt = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(sample["input_ids"][:start]) == prompt
    assert tokenizer.decode(sample["input_ids"][end:]) == "\n"


def test_all_turns_of_a_conversation_are_one_sample(tokenizer, end_ids):
    """Fails if turns are split into samples, or a user turn between them is learned."""
    talk = [_turn("system", "Be brief."), ASKED, SAID, AGAIN, SAID_AGAIN]
    (sample,) = tokenize(tokenizer, talk, end_ids)
    assert _said(tokenizer, sample) == [SAID["content"] + "<|im_end|>", SAID_AGAIN["content"] + "<|im_end|>"]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    assert tokenizer.decode(sample["input_ids"]) == whole


def test_what_nobody_answered_is_no_sample(tokenizer, end_ids):
    """Fails if a conversation without an answer becomes a sample, or a last question drops the answers before it."""
    assert tokenize(tokenizer, [ASKED], end_ids) == []
    (sample,) = tokenize(tokenizer, [ASKED, SAID, AGAIN], end_ids)
    assert _said(tokenizer, sample) == [SAID["content"] + "<|im_end|>"]


def test_a_template_that_rewrites_gives_a_sample_for_each_turn(tokenizer, end_ids):
    """Fails if thoughts of an earlier turn, which the template removes, come before a later answer, or if they are not
    learned in their own turn."""
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
    """Fails if --chat-template-kwargs changes nothing."""
    asking = copy.deepcopy(tokenizer)
    asking.chat_template = "{{ mood }}" + CUTTING
    (sample,) = tokenize(asking, [ASKED, SAID], end_ids, mood="Gladly. ")
    assert asking.decode(sample["input_ids"]).startswith("Gladly. <|im_start|>user")


def test_trim():
    """Fails if a cut answer keeps a label beyond the cut, or a span of one token is kept."""
    sample = {"input_ids": list(range(20)), "spans": [[2, 6], [9, 15]]}
    assert trim(sample, 50) == sample
    assert trim(sample, 15) == {"input_ids": list(range(15)), "spans": [[2, 6], [9, 15]]}
    assert trim(sample, 11) == {"input_ids": list(range(11)), "spans": [[2, 6], [9, 11]]}
    assert trim(sample, 10) == {"input_ids": list(range(10)), "spans": [[2, 6]]}
    assert trim(sample, 4) == {"input_ids": list(range(4)), "spans": [[2, 4]]}
    assert trim(sample, 3) is None


def test_long_conversations_are_cut(tokenizer, end_ids, tmp_path):
    """Fails if --max-length is exceeded, or a conversation with nothing left to learn is kept."""
    long = {"messages": [_turn("user", "Compute 9 * 7. " * 40), SAID]}
    path = _write(tmp_path / "data.jsonl", [long, {"messages": [ASKED, SAID]}])
    whole = _read(path, tokenizer, end_ids)
    cut = _read(path, tokenizer, end_ids, max_length=25)
    assert [len(sample["input_ids"]) > 25 for sample in whole] == [True, True]
    assert [len(sample["input_ids"]) for sample in cut] == [25]


def test_collate():
    """Fails if padding is learned, or a span is off by one."""
    samples = [{"input_ids": [7, 8, 9, 10], "spans": [[1, 2], [3, 4]]}, {"input_ids": [5, 6], "spans": [[0, 2]]}]
    ids, learned = collate(samples, torch.device("cpu"))
    assert ids.tolist() == [[7, 8, 9, 10], [5, 6, 0, 0]] and ids.dtype == torch.int64
    assert learned.int().tolist() == [[0, 1, 0, 1], [1, 1, 0, 0]]


LENGTHS = [(37 * i) % 101 + 10 for i in range(150)]


@pytest.mark.parametrize("batch_size", [1, 4, 200])
def test_an_epoch_holds_everything_once(batch_size):
    """Fails if a conversation is missing or repeated, or a batch is larger than `batch_size`."""
    batches = epoch_batches(LENGTHS, batch_size, seed=0, epoch=0)
    assert sorted(index for batch in batches for index in batch) == list(range(150))
    assert {len(batch) for batch in batches} <= set(range(1, batch_size + 1))
    assert len(batches) == -(-150 // batch_size)


def test_the_order_of_an_epoch():
    """Fails if one seed gives two orders, two seeds or epochs give one order, or batches are sorted by length."""
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
    """Fails if two processes get the same conversation in an epoch, or one gets more batches and waits for the rest."""
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
    """Fails if a resumed run gets other batches than the unbroken one, at the end of an epoch or after it."""
    unbroken = list(islice(micro_batches(LENGTHS, 4, 5, rank, ranks, 0), start + 20))
    assert list(islice(micro_batches(LENGTHS, 4, 5, rank, ranks, start), 20)) == unbroken[start:]


def test_fewer_batches_than_processes():
    """Fails if a process has no batch and the others wait for it."""
    batches = [next(micro_batches([5, 6], 2, 0, rank, 3, 0)) for rank in range(3)]
    assert [sorted(batch) for batch in batches] == [[0, 1]] * 3


def test_words_before_any_question_are_left_out():
    """Fails if a ShareGPT row that starts with the assistant stops a run, or its first turn is learned as an answer."""
    row = {"conversations": [{"from": "gpt", "value": "Hello!"}, {"from": "human", "value": "1 + 1?"}]}
    assert messages_of(row) == [{"role": "user", "content": "1 + 1?"}]
    with pytest.raises(ValueError, match="no user turn"):
        messages_of({"messages": [{"role": "assistant", "content": "Hello!"}]})


def test_lengths_and_padding():
    """Fails if lengths do not follow a shuffle, or the padded length is not a multiple."""
    data = Dataset.from_dict({"input_ids": [[1], [1, 2, 3], [1, 2]], "spans": [[[0, 1]]] * 3})
    assert lengths(data) == [1, 3, 2]
    assert lengths(data.select([2, 0])) == [2, 1]
    ids, learned = collate([data[1]], torch.device("cpu"), multiple=8)
    assert ids.tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]] and learned.sum() == 1


def test_many_conversations_are_tokenized_by_several_processes(tmp_path, tokenizer, end_ids, monkeypatch):
    """Fails if several processes give other samples than one process, or another order."""
    path = _write(tmp_path / "many.jsonl", [{"prompt": f"{i} + 1?", "response": f"It is {i + 1}."} for i in range(50)])
    alone = _read(path, tokenizer, end_ids)
    monkeypatch.setattr("sglang_dflash.training.conversations._MANY", 10)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert _read(path, tokenizer, end_ids) == alone

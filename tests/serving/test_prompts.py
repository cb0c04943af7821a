"""Prompt files: every documented field, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.serving.prompts import read_prompts
from sglang_dflash.serving.sessions import Message, Session, Turn

FLAG = "--dataset-name"


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_jsonl_fields(tmp_path: Path) -> None:
    """Fails where a documented field is ignored, an answer becomes a prompt, or the file's order changes."""
    separator = "one\u2028line"  # str.splitlines() splits it
    chat = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "the answer")]
    path = written(
        tmp_path,
        {"prompt": separator, "answer": "x", "solution": "y"},
        "",
        {"id": 7, "system": "S", "turns": ["a", "b"], "chat_template_kwargs": {"enable_thinking": False}},
        {"id": "chat", "messages": [{"role": role, "content": content} for role, content in chat]},
        {"id": "ids", "input_ids": [5, 0, 6]},
        {"id": "raw", "text": "def f("},
    )
    expected = [
        Session.of_texts("line-1", [separator]),
        Session("7", Session.of_texts("", ["a", "b"], "S").turns, {"enable_thinking": False}),
        Session("chat", (Turn(tuple(Message(*message) for message in chat[:4])),)),
        Session("ids", (Turn(()),), {}, (5, 0, 6)),
        Session("raw", (Turn(()),), text="def f("),
    ]
    assert read_prompts(path, FLAG) == read_prompts(path, FLAG, 9) == expected
    assert read_prompts(path, FLAG, 2) == expected[:2]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "it is not valid JSON"),
        ([1], "must be a JSON object"),
        (
            {"question": "x"},
            r"fields \['question'\]; .* exactly one of prompt, text, messages, turns, input_ids",
        ),
        ({"prompt": "x", "turns": ["x"]}, "exactly one of"),
        ({"text": "x", "prompt": "x"}, "exactly one of"),
        ({"text": ""}, "text must be a non-empty string"),
        ({"text": "x", "system": "S"}, "both `system` and `text`"),
        ({"prompt": ""}, "prompt must be a non-empty string"),
        ({"prompt": ["x"]}, "prompt must be a non-empty string"),
        ({"turns": []}, "turns must be a non-empty list of non-empty strings"),
        ({"turns": ["a", ""]}, "turns must be a non-empty list of non-empty strings"),
        ({"messages": "x"}, "messages must be a list of objects"),
        ({"messages": []}, "messages must contain a user message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages must contain a user message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'; .*as a user message"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content of a message .* must be a string"),
        ({"system": "S", "messages": [{"role": "system", "content": "T"}]}, "both `system` and messages"),
        ({"input_ids": [1, True]}, "input_ids must be"),
        ({"input_ids": [-1]}, "input_ids must be"),
        ({"input_ids": []}, "input_ids must be"),
        ({"input_ids": [1], "system": "S"}, "both `system` and `input_ids`"),
        ({"prompt": "x", "system": 1}, "system is 1; it must be a string"),
        ({"prompt": "x", "id": None}, "id is None"),
        ({"prompt": "x", "chat_template_kwargs": []}, r"chat_template_kwargs is \[\]; it must be an object"),
        ('{"prompt": "a \\ud83d b"}', r"prompt has half a character, \\ud83d, behind its first 2 characters"),
        ('{"turns": ["x", "\\ud83d"]}', r"turns\[1\] has half a character"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', r"messages\[0\].content has half a character"),
        ({"prompt": "x", "id": "first"}, "the id first is already used in line 1"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path: Path, row: Any, said: str) -> None:
    """Fails where a wrong line is accepted or skipped, or the message does not name it."""
    path = written(tmp_path, {"id": "first", "prompt": "x"}, row)
    with pytest.raises(ValueError, match=rf"^--dataset-name {path}, line 2: .*{said}"):
        read_prompts(path, FLAG)


def test_jsonl_files_that_hold_nothing(tmp_path: Path) -> None:
    """Fails where a missing, an empty or a binary file gives an empty dataset or a traceback."""
    with pytest.raises(ValueError, match=r"missing\.jsonl; it must be an existing JSONL file"):
        read_prompts(tmp_path / "missing.jsonl", FLAG)
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(written(tmp_path, ""), FLAG)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_prompts(binary, FLAG)

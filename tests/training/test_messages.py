"""Tool calls, tool results and tools: what is learned of them, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.serving.messages import messages_of, tools_of
from sglang_dflash.training.conversations import read, tokenize

END = "<|im_end|>"
# Writes tools, calls and results as many templates do: the objects as JSON.
TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- 'call ' + call.function.name + ' ' + (call.function.arguments | tojson) }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read", "parameters": PARAMETERS}}
RUN = {"type": "function", "function": {"description": "Runs it.", "name": "run", "parameters": {"type": "object"}}}


def calling(name: str, arguments: Any, id: str = "c1") -> dict[str, Any]:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(content: str, id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


ASKED = {"role": "user", "content": "What is in a.txt?"}
SESSION = [
    ASKED,
    calling("read", '{"path": "a.txt"}'),
    result("63"),
    {"role": "assistant", "content": "It holds 63."},
]


@pytest.fixture
def calls(tokenizer: Any) -> Any:
    """The embedded tokenizer with a chat template that knows tools."""
    made = copy.deepcopy(tokenizer)
    made.chat_template = TOOLS
    return made


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(tokenizer: Any, sample: dict[str, Any]) -> list[str]:
    return [tokenizer.decode(sample["input_ids"][start:end]) for start, end in sample["spans"]]


def test_calls_and_answers_are_learned(calls, end_ids):
    """Fails if a call is not learned, a result or the list of tools is, or a span is off."""
    row = {"messages": SESSION, "tools": [READ]}
    (sample,) = tokenize(calls, messages_of(row), end_ids, **tools_of(row))
    assert said(calls, sample) == [f'call read {{"path": "a.txt"}}{END}', f"It holds 63.{END}"]
    assert '"required": ["path"]' in calls.decode(sample["input_ids"][: sample["spans"][0][0]])


def test_a_call_is_learned_where_the_template_rewrites(calls, end_ids):
    """Fails if a call's sample has another prompt than the one that the target saw."""
    calls.chat_template = TOOLS.replace(
        "message.content }}", "(message.content if loop.last or message.role != 'tool' else 'cut') }}"
    )
    first, second = tokenize(calls, messages_of({"messages": SESSION}), end_ids)
    assert said(calls, first) == [f'call read {{"path": "a.txt"}}{END}']
    assert said(calls, second) == [f"It holds 63.{END}"]


def test_a_template_that_leaves_out_calls_is_refused(tokenizer, end_ids):
    """Fails if an empty turn is learned where a call was."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    with pytest.raises(ValueError, match="the chat template does not write the call of read behind its prompt"):
        tokenize(bare, messages_of({"messages": SESSION}), end_ids)


def test_rows_do_not_mix(calls, end_ids, tmp_path):
    """Fails if a row gets keys of other rows' objects, with null as value, or if differing types end the run."""
    other = [ASKED, calling("run", '{"count": [1, 2], "path": {"b": 1}}'), result("ok"), SESSION[3]]
    rows = [
        {"messages": SESSION, "tools": [READ]},
        {"messages": other, "tools": [RUN]},
        {"messages": [ASKED, SESSION[3]]},
    ]
    samples = list(read([write(tmp_path / "log.jsonl", *rows)], calls, end_ids, 4096, {}))
    assert said(calls, samples[1])[0] == f'call run {{"count": [1, 2], "path": {{"b": 1}}}}{END}'
    for row, sample in zip(rows, samples, strict=True):
        assert [sample] == tokenize(calls, messages_of(row), end_ids, **tools_of(row))
        assert "null" not in calls.decode(sample["input_ids"]).replace('"defer_loading": null', "").replace(
            '"description": null', ""
        )


def test_tools_as_text(calls, end_ids):
    """Fails where the list of tools is lost if it comes as JSON text, as SpecForge and speculators write it."""
    assert tools_of({"tools": json.dumps([READ, RUN])}) == tools_of({"tools": [READ, RUN]})
    assert tools_of({"tools": ""}) == tools_of({"tools": "[]"}) == {}


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "messages[1].content is None; it must be text"),
        (
            {"messages": [ASKED, {"role": "assistant", "tool_calls": []}]},
            "messages[1].content is None; it must be text",
        ),
        ({"messages": [ASKED, {"role": "tool", "tool_call_id": "c1"}]}, "messages[1].content is None; it must be text"),
        ({"messages": [ASKED, {**SESSION[1], "tool_calls": "read"}]}, "messages[1].tool_calls must be a list of obj"),
        ({"messages": [ASKED, {**SESSION[1], "tool_calls": [{"name": "read"}]}]}, 'must have a "function"'),
        ({"messages": [ASKED, calling("read", "{path: 3}")]}, "the arguments of a call of read are '{path: 3}'; they"),
        ({"messages": [ASKED, calling("read", "[1]")]}, "the arguments of a call of read are '[1]'; they must be a"),
        ({"messages": [ASKED, calling("read", 3)]}, "the arguments of a call of read are '3'; they must be a JSON"),
        (
            {"messages": [ASKED, {**result("63"), "tool_call_id": 1}]},
            "messages[1].tool_call_id is 1; it must be text",
        ),
        ({"messages": [ASKED, calling("read", '{"a": "\\ud83d"}')]}, "the arguments of a call of read.a has half a"),
        ({"messages": SESSION, "tools": [{"function": {"name": "\ud83d"}}]}, "tools[0].function.name has half a char"),
        ({"messages": SESSION, "tools": "read"}, "its tools are a text that is not valid JSON: "),
        ({"messages": SESSION, "tools": '{"read": {}}'}, "its tools must be a list of objects"),
        ({"messages": SESSION, "tools": {"read": {}}}, "its tools must be a list of objects"),
        ({"messages": SESSION, "tools": [{"name": "read"}]}, 'each of its tools must have a "function"'),
    ],
)
def test_a_malformed_row_is_refused_with_its_place(row, wrong, calls, end_ids, tmp_path):
    """Fails if a malformed call, result or tool is skipped, or the error is not a sentence that names the line."""
    path = write(tmp_path / "log.jsonl", {"messages": SESSION}, row)
    with pytest.raises(ValueError) as refused:
        read([path], calls, end_ids, 4096, {})
    assert str(refused.value).startswith(f"{path}, line 2: ") and wrong in str(refused.value)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)

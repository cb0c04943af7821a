"""Streamed tool calls: whatever the grouping of an answer's tokens, the client gets the same text and calls."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser

from sglang_dflash.host import tool_calls

TOOLS = [
    Tool(type="function", function=Function(name=name, parameters={"type": "object", "properties": {"path": {}}}))
    for name in ("read_file", "list_files")
]
CALLS = [{"name": "read_file", "arguments": {"path": "src/a.py"}}, {"name": "list_files", "arguments": {"path": "x y"}}]
AS_TAGS = "I will look.\n" + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in CALLS)
ANSWERS = {
    "qwen": AS_TAGS,
    "hermes": AS_TAGS,
    "mistral": f"I will look.\n[TOOL_CALLS] {json.dumps(CALLS)}",
    "llama3": f"<|python_tag|>{json.dumps(CALLS[0])}",
    "qwen3_coder": "I will look.\n<tool_call>\n<function=read_file>\n<parameter=path>\nsrc/a.py\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "I will look.\n<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>src/a.py</arg_value>\n</tool_call>",
}
PLAIN = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]|\w{1,5}| ?[^\w\s]+|\s+")  # about one token each


def streamed(name: str, chunks: list[str], hooked: bool) -> tuple[str, list[tuple[str, Any]]]:
    """The text, and the name and arguments of each call, as a client puts them together."""
    if name == "array":
        array = JsonArrayParser()
        results = [
            tool_calls.parse_array_in_pieces(JsonArrayParser.parse_streaming_increment, array, chunk, TOOLS)
            if hooked
            else array.parse_streaming_increment(chunk, TOOLS)
            for chunk in chunks
        ]
        results.append(array.finish(TOOLS))
        parts = [(result.normal_text, result.calls) for result in results]
    else:
        parser = FunctionCallParser(TOOLS, name)
        original = FunctionCallParser.parse_stream_chunk
        parts = [
            tool_calls.parse_in_pieces(original, parser, chunk) if hooked else original(parser, chunk)
            for chunk in chunks
        ]
        parts.append(parser.parse_stream_end())
    calls: dict[int, list[str]] = {}
    for _, items in parts:
        for item in items:
            held = calls.setdefault(item.tool_index, ["", ""])
            held[0] += item.name or ""
            held[1] += item.parameters or ""
    return "".join(text or "" for text, _ in parts), [
        (name, arguments) for _, (name, arguments) in sorted(calls.items())
    ]


def groupings(answer: str, count: int) -> list[list[str]]:
    """The answer's tokens in random groups of 1 to 8, and all at once."""
    tokens = PLAIN.findall(answer)
    assert "".join(tokens) == answer
    chance, found = random.Random(answer), [[answer]]
    for _ in range(count):
        left, chunks = list(tokens), []
        while left:
            size = chance.randint(1, 8)
            chunks.append("".join(left[:size]))
            left = left[size:]
        found.append(chunks)
    return found


@pytest.mark.parametrize("name", [*ANSWERS, "array"])
def test_any_grouping_gives_the_same_calls(name):
    """Fails where text before a call, or a part of a call, is lost because tokens came together."""
    answer = ANSWERS.get(name, json.dumps([{"name": c["name"], "parameters": c["arguments"]} for c in CALLS]))
    text, calls = streamed(name, PLAIN.findall(answer), hooked=False)  # as plain decoding streams it
    assert calls and [json.loads(arguments) for _, arguments in calls] == [c["arguments"] for c in CALLS[: len(calls)]]
    for chunks in groupings(answer, 40):
        assert streamed(name, chunks, hooked=True) == (text, calls), chunks


def test_without_the_hook_text_and_arguments_are_lost():
    """Fails where SGLang's parsers no longer need the hook."""
    text, calls = streamed("qwen", PLAIN.findall(AS_TAGS), hooked=False)
    others = [streamed("qwen", chunks, hooked=False) for chunks in groupings(AS_TAGS, 40)]
    assert any(other[0] != text for other in others) and any(other[1] != calls for other in others)

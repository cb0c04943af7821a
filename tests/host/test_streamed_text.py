"""Thoughts and tool calls of a stream do not depend on how many tokens a step brings, for each of SGLang's parsers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from random_groups import random_groups
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from stream_answers import CALLS, REASONING_ANSWERS, TOKENIZERS, TOOL_ANSWERS, TOOLS, TYPED, called

from sglang_dflash.host.patches import streamed_text

GROUPINGS = 50  # of each answer's tokens, beside all at once and one by one
# What real tokenizers do: special tokens are apart; words carry the space before them, and marks the line's end behind.
SPECIAL = (
    r"<\|[^<>\s|]*\|>|<\|(?:tool_call|channel)>|<(?:tool_call|channel)\|>|<\|\"\|>|<｜(?!DSML|GCML)[^<>｜]*｜>"
    r"|｜(?:DSML|GCML)｜|\]<\]minimax\[>\[|</?(?:tool_calls?|tool_sep|arg_key|arg_value|think|mm:think|iquest_tool_call"
    r"|minimax:tool_call|dots_function_call)>|</?ifm\|\w+>|\[/?(?:TOOL_CALLS|ARGS|THINK)\]|◁/?think▷|\n</rfl:parameter>"
)
WORD = (
    r"[^\r\n\w]?[^\W\d_\u2e80-\uffff]{1,5}|[\u2e80-\u9fff\uac00-\ud7ff]|\d{1,3}| ?(?:[^\s\w]|_){1,4}[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s|."
)
# Parsers of thoughts, and the parsers of calls that models have beside them.
PAIRS = {
    **{name: name for name in ("apertus2509", "beam", "cohere_command4", "glm45", "gpt-oss", "hunyuan", "kimi_k2")},
    **{name: name for name in ("kimi_k3", "ling3", "minimax-m3", "mistral", "muse", "gemma4", "gigachat35", "inkling")},
    **{"deepseek-v3": "deepseekv31", "deepseek-v4": "deepseekv4", "qwen3": "qwen25", "nemotron_3": "qwen3_coder"},
    **{"iquest_q1": "iquest_q1", "k2_horizon": "k2_horizon", "response_template": "response_template"},
}
ARRAYS = [json.dumps([{"name": name, "parameters": given} for name, given in calls]) for calls in (CALLS, [TYPED])]
# A parser must not take them for calls. After a lone `{`, llama3's drops the rest of an answer.
PROSE = 'In `a[0]`, `{k}` and x_{i} we write {"k": 1}, ({x: 2}) and <b>好😀</b> [NOTE]:\n\n{\n "name": "x"\n}\nDone.'

Answer = tuple[str, str, list[tuple[str, str]]]  # thought, text, and the name and arguments of each call


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_text, "serves_dflash", lambda: True)
    logging.getLogger("sglang.srt").setLevel(logging.CRITICAL)  # parsers complain of unknown tools


def tokens_of(text: str) -> list[str]:
    found: list[str] = []
    for part in re.split(f"({SPECIAL})", text):
        found += [part] if re.fullmatch(SPECIAL, part) else re.findall(WORD, part, re.S)
    assert "".join(found) == text
    return [token for token in found if token]


def groupings(tokens: list[str], count: int = GROUPINGS) -> list[list[str]]:
    """The tokens in random groups of 1 to 16; all at once; one by one."""
    answer = "".join(tokens)
    drawn = random_groups(tokens, answer, count)
    return [[answer], tokens, *(["".join(group) for group in groups] for groups in drawn)]


def put_together(thoughts: list[str | None], parts: list[tuple[str | None, list[Any]]]) -> Answer:
    """What a client makes of a stream."""
    calls: dict[int, list[str]] = {}
    for _, items in parts:
        for item in items:
            held = calls.setdefault(item.tool_index, ["", ""])
            held[0] += item.name or ""
            held[1] += item.parameters or ""
    text = "".join(text or "" for text, _ in parts)
    return "".join(filter(None, thoughts)), text, [(name, given) for _, (name, given) in sorted(calls.items())]


def array_run(chunks: list[str], hooked: bool) -> Answer:
    parser, original = JsonArrayParser(), JsonArrayParser.parse_streaming_increment
    results = [
        streamed_text.parse_array_in_pieces(original, parser, chunk, TOOLS)
        if hooked
        else original(parser, chunk, TOOLS)
        for chunk in chunks
    ]
    return put_together([], [(result.normal_text, result.calls) for result in [*results, parser.finish(TOOLS)]])


def run(thoughts: str | None, calls: str | None, chunks: list[str], hooked: bool, force: bool | None = None) -> Answer:
    """The stream through a parser of thoughts, one of calls, or both, as SGLang's chat endpoint has them."""
    thinking = calling = None
    if thoughts:
        active = calls is not None
        thinking = ReasoningParser(
            thoughts, True, force, tokenizer=TOKENIZERS.get(thoughts), tool_call_parser_active=active
        )
    if calls:
        calling = FunctionCallParser(TOOLS, calls, tokenizer=TOKENIZERS.get(calls))
    thought: list[str | None] = []
    parts: list[tuple[str | None, list[Any]]] = []

    def call(text: str | None) -> None:
        if calling is None:
            parts.append((text, []))
        elif hooked:
            original = FunctionCallParser.parse_stream_chunk
            parts.append(streamed_text.parse_calls_in_pieces(original, calling, text or ""))
        else:
            parts.append(calling.parse_stream_chunk(text or ""))

    for chunk in chunks:
        text: str | None = chunk
        if thinking is not None:
            original = ReasoningParser.parse_stream_chunk
            one, text = (
                streamed_text.parse_thoughts_in_pieces(original, thinking, chunk)
                if hooked
                else thinking.parse_stream_chunk(chunk)
            )
            thought.append(one)
        call(text)
    if thinking is not None:
        one, text = thinking.parse_stream_end()
        thought.append(one)
        if text:
            call(text)
    if calling is not None:
        parts.append(calling.parse_stream_end())
    return put_together(thought, parts)


def assert_independent(answer: str, run_chunks: Callable[[list[str], bool], Answer]) -> Answer:
    """Fails where a grouping changes what plain decoding streams, token by token; returns that."""
    tokens = tokens_of(answer)
    expected = run_chunks(tokens, False)
    for chunks in groupings(tokens):
        assert run_chunks(chunks, True) == expected, chunks
    return expected


def test_every_parser_has_answers() -> None:
    """Fails where SGLang has a parser that no test here feeds."""
    assert TOOL_ANSWERS.keys() == FunctionCallParser.ToolCallParserEnum.keys()
    assert REASONING_ANSWERS.keys() == ReasoningParser.DetectorMap.keys()
    assert PAIRS.keys() <= REASONING_ANSWERS.keys() and set(PAIRS.values()) <= TOOL_ANSWERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOL_ANSWERS)
def test_calls(name: str) -> None:
    """Fails where text beside a call, or a part of a call, is lost or changed because tokens came together."""
    for answer in TOOL_ANSWERS[name]:
        _, _, calls = assert_independent(answer, lambda chunks, hooked: run(None, name, chunks, hooked))
        assert {called_name for called_name, _ in calls} & {called_name for called_name, _ in called(answer)}, calls


@pytest.mark.parametrize("name", TOOL_ANSWERS)
def test_prose_beside_tools(name: str) -> None:
    """Fails where an answer without calls loses text because tokens came together."""
    if name == "deepseekv3":
        pytest.skip("plain decoding itself drops ``` there")
    assert_independent(PROSE, lambda chunks, hooked: run(None, name, chunks, hooked))


@pytest.mark.parametrize("answer", ARRAYS)
def test_arrays(answer: str) -> None:
    """Fails where `tool_choice` asks for calls and a part of one is lost because tokens came together."""
    assert assert_independent(answer, array_run)[2]


@pytest.mark.parametrize("name", REASONING_ANSWERS)
def test_thoughts(name: str) -> None:
    """Fails where text goes to the thought or to the answer as tokens came together."""
    forced = {"k2_horizon": (True,)}.get(name, (None, False, True))
    for answer in REASONING_ANSWERS[name]:
        for force in forced:
            assert_independent(answer, lambda chunks, hooked, force=force: run(name, None, chunks, hooked, force))


@pytest.mark.parametrize("name", PAIRS)
def test_thoughts_before_calls(name: str) -> None:
    """Fails where the parser of calls gets the answer in other parts than in plain decoding."""
    force = True if name.startswith("deepseek-v4") else None
    for answer in REASONING_ANSWERS[name]:
        assert_independent(answer, lambda chunks, hooked: run(name, PAIRS[name], chunks, hooked, force))


def test_without_the_hooks_text_and_calls_are_lost() -> None:
    """Fails where SGLang's parsers no longer need the hooks."""
    for thoughts, calls, answer in (
        ("qwen3", None, "Sure.<think>hm</think>ok"),
        (None, "qwen", TOOL_ANSWERS["qwen"][0]),
    ):
        force = None if calls else False
        tokens = tokens_of(answer)
        found = {repr(run(thoughts, calls, chunks, False, force)) for chunks in groupings(tokens)}
        assert len(found) > 1, answer

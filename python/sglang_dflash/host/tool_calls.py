"""Streamed tool calls: a block's tokens come together, but are parsed as if they came one by one.

SGLang's parsers take an increment for one token. Of a longer one they may drop the text before a call, or a call's
arguments. So an answer's calls would depend on how its tokens happened to arrive.
"""

from __future__ import annotations

import re
from typing import Any

from sglang_dflash.host.hooking import AROUND, hook

_PIECES = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]|\w+|\s|[^\w\s]")
"""Marks such as <tool_call> and [TOOL_CALLS], which are single tokens; words, and each other character."""
_WHY = "a parser drops text or arguments where several tokens come together"
_UNTIL = "SGLang's parsers take several"


@hook(
    "sglang.srt.function_call.function_call_parser.FunctionCallParser.parse_stream_chunk",
    AROUND,
    why=_WHY,
    until=_UNTIL,
)
def parse_in_pieces(original: Any, parser: Any, chunk_text: str) -> tuple[str, list[Any]]:
    """The text and the calls of all pieces, in their order."""
    pieces = _PIECES.findall(chunk_text)
    if len(pieces) < 2:
        return original(parser, chunk_text)
    texts, calls = [], []
    for piece in pieces:
        text, called = original(parser, piece)
        texts.append(text or "")
        calls += called
    return "".join(texts), calls


@hook(
    "sglang.srt.function_call.json_array_parser.JsonArrayParser.parse_streaming_increment",
    AROUND,
    why=_WHY,
    until=_UNTIL,
)
def parse_array_in_pieces(original: Any, parser: Any, new_text: str, tools: Any) -> Any:
    """The same for `tool_choice` that asks for a call: the answer is a JSON array."""
    pieces = _PIECES.findall(new_text)
    if len(pieces) < 2:
        return original(parser, new_text, tools)
    first, *others = [original(parser, piece, tools) for piece in pieces]
    for other in others:
        first.normal_text = (first.normal_text or "") + (other.normal_text or "")
        first.calls = [*first.calls, *other.calls]
    return first

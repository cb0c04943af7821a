"""Streamed text: a step's tokens come together, but a client reads what it would read if they came one by one.

SGLang's detokenizer, its parsers of thoughts and tool calls, and its Ollama endpoints take a step for one token. Of a
longer one they repeat or drop text, or put it to the wrong place.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.start.version import serves_dflash
from sglang_dflash.host.worker.protocols import Req

_INCOMPLETE = "\ufffd"  # what a tokenizer decodes the first bytes of a character to
_MARK = r"<[^<>\s]*>|\[[A-Z_/]+\]"
_OTHER = r"(?:[^\w\s`<\[]|_)"
_PIECES = re.compile(rf"{_MARK}| ?[^\W_]+| ?{_OTHER}+[\r\n]*|[`<\[]{_OTHER}*[\r\n]*|\s")
"""Marks such as <tool_call> and [TOOL_CALLS]; then what tokenizers cut a text to first: words, and runs of other
characters, each with the space before it and the line's end behind. A mark's first character begins a piece, because a
step may end inside the mark; so does a backtick, because deepseekv3's parser drops three of them that come together.
A brace is not cut off what stands before it: llama3's parser takes a lone one for a call, and drops the text after."""
_answer: ContextVar[tuple[str, list[str]]] = ContextVar("answer", default=("", []))
"""Of a request's step: the answer as the parser of thoughts gave it, and what it gave for each piece. The parser of
calls gets the same parts: for one token, <|call|>, gpt-oss's parser of thoughts gives a whole call."""
_WHY = "a parser drops or misplaces text where several tokens come together"
_UNTIL = "SGLang's parsers take several"


@hook(
    "sglang.srt.managers.detokenizer_manager.find_printable_text",
    AROUND,
    why="it may hold text back that an earlier step has sent, and that is then sent again",
    until="SGLang's detokenizer counts what it has sent",
)
def printable_text(original: Any, text: str) -> str:
    """What can be sent of the text of uncommitted tokens whose last character is incomplete: all before it.

    The text of more tokens begins with what this returns for fewer. SGLang's choice looks for spaces and for Chinese
    characters at the end, so it can be shorter for more tokens.
    """
    return text.rstrip(_INCOMPLETE) if serves_dflash() else original(text)


@hook(
    "sglang.srt.managers.schedule_batch.Req.check_match_stop_str_prefix",
    AROUND,
    why="the first characters of a stop string are sent where the next one is incomplete",
    until="SGLang looks behind incomplete characters",
)
def may_begin_a_stop(original: Any, req: Req) -> bool:
    """Whether the text of `req` ends with the first characters of a stop string, so that it must not be sent yet."""
    if original(req):
        return True
    stops: list[str] = req.sampling_params.stop_strs
    if not stops or not serves_dflash():
        return False
    # A token has a byte at least; a character that is incomplete has three at most.
    tail = req.tokenizer.decode(req.output_ids[-max(len(stop.encode()) for stop in stops) - 3 :]).rstrip(_INCOMPLETE)
    return any(tail.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))


@hook("sglang.srt.parser.reasoning_parser.ReasoningParser.parse_stream_chunk", AROUND, why=_WHY, until=_UNTIL)
def parse_thoughts_in_pieces(original: Any, parser: Any, chunk_text: str) -> tuple[str | None, str | None]:
    """The thought and the answer of all pieces, in their order."""
    if not (pieces := _pieces(chunk_text)):
        return original(parser, chunk_text)
    thoughts, texts = zip(*(original(parser, piece) for piece in pieces), strict=True)
    parts = [*filter(None, texts)]
    answer = "".join(parts)
    _answer.set((answer, parts))
    return "".join(filter(None, thoughts)), answer


@hook(
    "sglang.srt.function_call.function_call_parser.FunctionCallParser.parse_stream_chunk",
    AROUND,
    why=_WHY,
    until=_UNTIL,
)
def parse_calls_in_pieces(original: Any, parser: Any, chunk_text: str) -> tuple[str, list[Any]]:
    """The text and the calls of all pieces, in their order."""
    if not (pieces := _pieces(chunk_text)):
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
    if not (pieces := _pieces(new_text)):
        return original(parser, new_text, tools)
    first, *others = [original(parser, piece, tools) for piece in pieces]
    for other in others:
        first.normal_text = (first.normal_text or "") + (other.normal_text or "")
        first.calls = [*first.calls, *other.calls]
    return first


def _pieces(text: str) -> list[str]:
    """`text` in pieces of about a token; nothing where it has none, or where another server than ours decodes."""
    if not serves_dflash():
        return []
    answer, parts = _answer.get()
    return parts if text is answer else _PIECES.findall(text)


class _Ollama:
    """What SGLang's Ollama endpoints need of themselves, with the text of a last step in a chunk before the last one.

    They send no text with a stream's last chunk, and take each chunk for the whole text so far.
    """

    def __init__(self, serving: Any, first: dict[str, Any], others: AsyncIterator[dict[str, Any]]) -> None:
        self._serving, self._first, self._others = serving, first, others

    @property
    def tokenizer_manager(self) -> _Ollama:  # no attribute: a cycle would keep the request of a client that has left
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)

    async def generate_request(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
        text, chunk = "", self._first
        while True:
            incremental = self._serving.tokenizer_manager.incremental_streaming_output
            whole = not incremental or (_aborted(chunk) and chunk["text"].startswith(text))
            text = chunk["text"] if whole else text + chunk["text"]
            if chunk["meta_info"].get("finish_reason") is not None:
                yield {**chunk, "text": text, "meta_info": {**chunk["meta_info"], "finish_reason": None}}
            yield {**chunk, "text": text}
            try:
                chunk = await anext(self._others)
            except StopAsyncIteration:
                return


def _aborted(chunk: dict[str, Any]) -> bool:
    return (chunk["meta_info"].get("finish_reason") or {}).get("type") == "abort"


@hook(
    "sglang.srt.entrypoints.ollama.serving.OllamaServing._stream_chat_response",
    AROUND,
    why="the text of a stream's last step is lost, and a refused stream is cut off",
    until="SGLang sends both",
)
@hook(
    "sglang.srt.entrypoints.ollama.serving.OllamaServing._stream_generate_response",
    AROUND,
    why="the text of a stream's last step is lost, and a refused stream is cut off",
    until="SGLang sends both",
)
async def stream_to_ollama(original: Any, serving: Any, request: Any, raw_request: Any, model: str) -> Any:
    """Sends an Ollama client the text of all steps.

    Raises:
        ValueError, HTTPException: the request is refused before anything is sent.
    """
    if not serves_dflash():
        return await original(serving, request, raw_request, model)
    chunks = serving.tokenizer_manager.generate_request(request, raw_request)
    first = await anext(chunks)
    if _aborted(first) and (status := first["meta_info"]["finish_reason"].get("status_code")):
        raise HTTPException(status, first["meta_info"]["finish_reason"]["message"])
    return await original(_Ollama(serving, first, chunks), request, raw_request, model)

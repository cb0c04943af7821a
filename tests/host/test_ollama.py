"""SGLang's Ollama endpoints: a stream has the text of all steps, and a refused request is answered before it begins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.entrypoints.ollama.serving import OllamaServing

from sglang_dflash.host.patches import streamed_text
from sglang_dflash.host.start import requests


def chunk(text: str, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "meta_info": {"finish_reason": finish}}


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_text, "serves_dflash", lambda: True)


def ollama(chunks: list[dict[str, Any]], incremental: bool = False) -> OllamaServing:
    """SGLang's endpoints over a server that answers with `chunks`."""

    async def generate_request(*_: Any) -> AsyncIterator[dict[str, Any]]:
        for one in chunks:
            yield one

    manager: Any = SimpleNamespace(generate_request=generate_request, incremental_streaming_output=incremental)
    return OllamaServing(manager)


def streamed(endpoints: OllamaServing) -> tuple[str, list[bool]]:
    """The text of a stream, and whether each line is the last one."""

    async def read() -> list[dict[str, Any]]:
        original = OllamaServing._stream_chat_response
        response = await streamed_text.stream_to_ollama(original, endpoints, object(), object(), "m")
        return [json.loads(line) async for line in response.body_iterator]

    lines = asyncio.run(read())
    return "".join(line["message"]["content"] for line in lines), [line["done"] for line in lines]


STOP = {"type": "stop"}


@pytest.mark.parametrize(
    ("chunks", "incremental"),
    [
        ([chunk("ab"), chunk("abcd", STOP)], False),
        ([chunk("ab"), chunk("cd", STOP)], True),
        ([chunk("abcd", STOP)], False),
        ([chunk("ab"), chunk("cd"), chunk("abcd", {"type": "abort"})], True),
    ],
    ids=["cumulative", "increments", "one step", "an abort brings the whole text"],
)
def test_a_stream_has_the_text_of_all_steps(chunks: list[dict[str, Any]], incremental: bool) -> None:
    """Fails where text of a step is lost or comes twice, or the stream does not end once."""
    text, done = streamed(ollama(chunks, incremental))
    assert text == "abcd" and done == [False] * (len(done) - 1) + [True]


def test_a_refused_stream_is_refused() -> None:
    """Fails where a request that the scheduler refuses gets an empty answer."""
    refused = {"type": "abort", "status_code": 503, "message": "The queue is full."}
    with pytest.raises(HTTPException, match="queue is full") as error:
        streamed(ollama([chunk("", refused)]))
    assert error.value.status_code == 503


def test_a_refused_request_is_a_400() -> None:
    """Fails where what SGLang refuses with a ValueError is an error of the server."""

    async def refuse(*_: Any) -> None:
        raise ValueError("too long")

    for request in (SimpleNamespace(messages=[]), SimpleNamespace(messages=["a"]), SimpleNamespace(prompt="a")):
        with pytest.raises(HTTPException) as error:
            asyncio.run(requests.refuse_as_ollama(refuse, object(), request, object()))
        assert error.value.status_code == 400

"""Requests streamed answers from an OpenAI-compatible server and records when tokens arrive."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx

from sglang_dflash.serving.client import CONNECTIONS
from sglang_dflash.serving.completion import Completion, CompletionStream
from sglang_dflash.serving.errors import sentence

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# Request fields beyond OpenAI's that make each engine report token ids, acceptance and cached tokens.
EXTRAS: dict[str, dict[str, Any]] = {
    "sglang": {"return_token_ids": True, "return_spec_tokens_details": True, "return_cached_tokens_details": True},
    "vllm": {"return_token_ids": True},
    "other": {},
}
CHAT_EXTRAS = {
    **EXTRAS,
    "sglang": {
        "return_input_ids_in_sglext": True,
        "return_output_ids_in_sglext": True,
        "return_spec_tokens_details": True,
        "return_cached_tokens_details": True,
    },
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of every request.

    Fields:
        max_new_tokens: limit per answer; lower if the context has less room.
        seed: sent with sampled requests.
        ignore_eos: generate until `max_new_tokens`; SGLang and vLLM support it.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def body(self, room: int) -> dict[str, Any]:
        """The request's fields. `room`: tokens left in the context."""
        body: dict[str, Any] = {"max_tokens": min(self.max_new_tokens, room), "temperature": self.temperature}
        if self.temperature > 0:
            body["top_p"] = self.top_p
            if self.seed is not None:
                body["seed"] = self.seed
        return body | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass(frozen=True, slots=True)
class Chat:
    """A request with tools. The server renders it and parses the answer's calls.

    Fields:
        messages, tools: as OpenAI's API has them.
        template: keyword arguments of the chat template.
    """

    messages: list[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    template: dict[str, Any]


class Endpoint:
    """One running server. Use it as an asynchronous context manager."""

    def __init__(self, url: str, engine: str, stall_s: float, headers: dict[str, str] | None = None) -> None:
        """
        Args:
            url: without /v1.
            engine: a key of EXTRAS.
            stall_s: a request fails after this many seconds without data.
            headers: sent with every request, such as an API key.
        """
        self.url = url
        self.engine = engine
        self.stall_s = stall_s
        self.stalled = False
        """Whether no stream got data while a request waited `stall_s`."""
        self._heard_at = 0.0
        self.model = ""
        self.context = 0
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers or {},
            timeout=httpx.Timeout(stall_s, connect=30.0),
            limits=CONNECTIONS,
        )
        self._openai: AsyncOpenAI | None = None

    async def __aenter__(self) -> Endpoint:
        """
        Raises:
            ValueError: the server lists no model.
        """
        try:
            models = (await self._http.get("/v1/models")).raise_for_status().json()["data"]
            self.model = models[0]["id"]
            self.context = models[0].get("max_model_len") or 0
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            await self._http.aclose()
            raise ValueError(f"{self.url}/v1/models lists no model: {sentence(error, 300)}") from None
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def ask(
        self, prompt_ids: list[int], sampling: Sampling, begin: float, chat: Chat | None = None
    ) -> Completion:
        """Requests one streamed answer. A failure is part of it, not raised.

        Args:
            begin: value of `time.perf_counter()` from which the completion's times count.
            chat: asked at /v1/chat/completions, if there is one; `prompt_ids` are what the target's template makes.
        """
        stream = CompletionStream(time.perf_counter() - begin)
        room = self.context - len(prompt_ids) if self.context else sampling.max_new_tokens
        failure = ""
        if room < 1:
            failure = f"the prompt has {len(prompt_ids)} tokens, but the context has {self.context}"
            return stream.completion(failure, stream.start_s)
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **sampling.body(room)}
        events = self._chat_events(body, chat) if chat else self._events({**body, "prompt": prompt_ids})
        try:
            async for event in events:
                self._heard_at = time.perf_counter()
                stream.take(event, self._heard_at - begin)
        except httpx.ReadTimeout:
            failure = f"no data for {self.stall_s:g} s (--stall-s)"
            self.stalled = time.perf_counter() - self._heard_at >= self.stall_s
        except (httpx.HTTPError, ValueError) as error:
            failure = sentence(error, 300)
        except AttributeError as error:
            if error.name != "getpeername":
                raise
            failure = "the server closed the connection while it was made"  # anyio 4.16 asks a socket that is gone
        completion = stream.completion(failure, time.perf_counter() - begin)
        foreign = chat is not None and completion.answered and not stream.rendered_as(prompt_ids)
        return replace(completion, foreign_prompt=foreign)

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("POST", "/v1/completions", json=body | EXTRAS[self.engine]) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    yield json.loads(data)

    def open_chats(self) -> None:
        """Makes the client of chats, which takes a second; so no request should wait for it."""
        from openai import AsyncOpenAI

        key = self._http.headers.get("authorization", "").removeprefix("Bearer ") or "none"
        self._openai = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, http_client=self._http, max_retries=0)

    async def _chat_events(self, body: dict[str, Any], chat: Chat) -> AsyncIterator[dict[str, Any]]:
        from openai import OpenAIError

        assert self._openai is not None, "open_chats comes first"
        extra = {**CHAT_EXTRAS[self.engine], "chat_template_kwargs": chat.template}
        ignores_eos = body.pop("ignore_eos", None)
        extra |= {} if ignores_eos is None else {"ignore_eos": ignores_eos}
        try:
            answer: Any = self._openai.chat.completions.create(
                **body, messages=chat.messages, tools=chat.tools, tool_choice="auto", extra_body=extra
            )
            async with await answer as stream:
                async for chunk in stream:
                    yield chunk.model_dump()
        except OpenAIError as error:
            cause = error.__cause__
            raise (cause if isinstance(cause, httpx.HTTPError) else ValueError(str(error))) from None

    async def flush(self) -> bool:
        """Empties the prefix cache; False if the server cannot do that."""
        path = {"sglang": "/flush_cache?timeout=30", "vllm": "/reset_prefix_cache"}.get(self.engine)
        if path is None:
            return False
        try:
            return (await self._http.post(path)).status_code == 200
        except httpx.HTTPError:
            return False

    async def counters(self) -> str:
        """The page with the server's own counters, which `serving.counters` reads; "" if it has none."""
        path = {"sglang": "/server_info", "vllm": "/metrics"}.get(self.engine)
        if path is None:
            return ""
        try:
            response = await self._http.get(path)
            return response.text if response.status_code == 200 else ""
        except httpx.HTTPError:
            return ""

"""Requests streamed completions from an OpenAI-compatible server and records when tokens arrive."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from sglang_dflash.serving.completion import Completion, CompletionStream
from sglang_dflash.serving.errors import sentence

# Request fields beyond OpenAI's that make each engine report token ids, acceptance and cached tokens.
EXTRAS: dict[str, dict[str, Any]] = {
    "sglang": {"return_token_ids": True, "return_spec_tokens_details": True, "return_cached_tokens_details": True},
    "vllm": {"return_token_ids": True},
    "other": {},
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
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

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

    async def ask(self, prompt_ids: list[int], sampling: Sampling, begin: float) -> Completion:
        """Requests one streamed completion. A failure is part of it, not raised.

        Args:
            begin: value of `time.perf_counter()` from which the completion's times count.
        """
        stream = CompletionStream(time.perf_counter() - begin)
        room = self.context - len(prompt_ids) if self.context else sampling.max_new_tokens
        failure = ""
        if room < 1:
            failure = f"the prompt has {len(prompt_ids)} tokens, but the context has {self.context}"
            return stream.completion(failure, stream.start_s)
        body = {
            **{"model": self.model, "prompt": prompt_ids, "stream": True, "stream_options": {"include_usage": True}},
            **sampling.body(room),
            **EXTRAS[self.engine],
        }
        try:
            async for event in self._events(body):
                self._heard_at = time.perf_counter()
                stream.take(event, self._heard_at - begin)
        except httpx.ReadTimeout:
            failure = f"no data for {self.stall_s:g} s (--stall-s)"
            self.stalled = time.perf_counter() - self._heard_at >= self.stall_s
        except (httpx.HTTPError, ValueError) as error:
            failure = sentence(error, 300)
        return stream.completion(failure, time.perf_counter() - begin)

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    yield json.loads(data)

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

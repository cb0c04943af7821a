"""Requests streamed completions from an OpenAI-compatible server and records when tokens arrive."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from sglang_dflash.bench.records import Record

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


@dataclass(slots=True)
class _Stream:
    """The part of one answer that has arrived so far."""

    first_s: float | None = None
    last_s: float = 0.0
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    cached: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any], now: float) -> None:
        """
        Raises:
            ValueError: the event is an error, or not a JSON object.
        """
        if not isinstance(event, dict):
            raise ValueError(f"the stream has an event that is not a JSON object: {str(event)[:80]}")
        if event.get("error"):
            said = event["error"]
            raise ValueError(said.get("message", str(said)) if isinstance(said, dict) else str(said))
        for choice in event.get("choices") or []:
            ids, text = choice.get("token_ids") or [], choice.get("text") or ""
            if ids or text:
                self.first_s = now if self.first_s is None else self.first_s
                self.last_s = now
            self.ids += ids
            self.texts.append(text)
            self.finish = choice.get("finish_reason") or self.finish
        self.usage = event.get("usage") or self.usage
        extension = event.get("sglext") or {}
        self.details = extension.get("spec_tokens_details") or self.details
        self.cached = extension.get("cached_tokens_details") or self.cached

    def _flaw(self, counted: int) -> str:
        if self.first_s is None:
            return "the answer has no tokens"
        if self.finish in ("", "abort"):
            return f"the answer is incomplete: its finish reason is {self.finish!r}"
        return "" if counted else "the server reports neither usage nor token ids"

    def record(self, session: str, turn: int, start_s: float, failure: str, now: float) -> Record:
        text = "".join(self.texts)
        counted = self.usage.get("completion_tokens") or len(self.ids)
        if not failure:
            failure = self._flaw(counted)
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if self.cached:
            cached = self.cached.get("device", 0) + self.cached.get("host", 0) + (self.cached.get("storage") or 0)
        return Record(
            session=session,
            turn=turn,
            start_s=start_s,
            first_s=self.first_s,
            end_s=self.last_s if self.first_s is not None else now,
            prompt_tokens=self.usage.get("prompt_tokens") or 0,
            tokens=counted,
            ids=self.ids,
            text=text,
            finish="" if failure else self.finish,
            cached_tokens=cached,
            steps=self.details.get("spec_verify_ct") or 0,
            drafted=drafted(self.details),
            accept_histogram=self.details.get("spec_correct_drafts_histogram") or [],
            failure=failure,
        )


def drafted(details: dict[str, Any]) -> int:
    """Number of drafts that were verified.

    SGLang's `spec_num_proposed_drafts` counts whole blocks, so the histogram of widths is used if there is one.

    Args:
        details: SGLang's `SpecTokensDetails` of one answer.
    """
    widths = details.get("spec_cap_lens_histogram") or []  # number of steps with 0, 1, 2, ... rows
    if widths:
        return sum((width - 1) * steps for width, steps in enumerate(widths) if width)
    return details.get("spec_num_proposed_drafts") or 0


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
            raise ValueError(f"{self.url}/v1/models lists no model: {_sentence(error)}") from None
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt_ids: list[int], sampling: Sampling, session: str, turn: int, begin: float) -> Record:
        """Requests one streamed completion. A failure is reported in the record, not raised.

        Args:
            begin: value of `time.perf_counter()` when the cell began.
        """
        stream = _Stream()
        start_s = time.perf_counter() - begin
        room = self.context - len(prompt_ids) if self.context else sampling.max_new_tokens
        failure = ""
        if room < 1:
            failure = f"the prompt has {len(prompt_ids)} tokens, but the context has {self.context}"
            return stream.record(session, turn, start_s, failure, start_s)
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
            failure = _sentence(error)
        return stream.record(session, turn, start_s, failure, time.perf_counter() - begin)

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

    async def metrics(self) -> str:
        """The server's Prometheus text; "" if it has none."""
        try:
            response = await self._http.get("/metrics")
            return response.text if response.status_code == 200 else ""
        except httpx.HTTPError:
            return ""


def _sentence(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:300]

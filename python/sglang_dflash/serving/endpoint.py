"""Asks one running server for streamed answers to token ids: SGLang at its own endpoint, others at /v1/completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx

from sglang_dflash.serving.client import CONNECTIONS
from sglang_dflash.serving.completion import Completion
from sglang_dflash.serving.errors import ServerError, sentence

FLUSH = {"sglang": "/flush_cache?timeout=30", "vllm": "/reset_prefix_cache"}
COUNTERS = {"sglang": "/server_info", "vllm": "/metrics"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of every request.

    Fields:
        max_new_tokens: limit per answer; lower if the context has less room.
        top_k: None for the whole vocabulary.
        seed: sent with sampled requests.
        ignore_eos: generate until `max_new_tokens`; SGLang and vLLM support it.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def fields(self, engine: str, room: int) -> dict[str, Any]:
        """The fields of a request, as the engine names them. `room`: tokens left in the context."""
        own = engine == "sglang"
        most = min(self.max_new_tokens, room)
        given: dict[str, Any] = {"max_new_tokens" if own else "max_tokens": most, "temperature": self.temperature}
        if self.temperature > 0:
            given["top_p"] = self.top_p
            given |= {} if self.top_k is None else {"top_k": self.top_k}
            given |= {} if self.seed is None else {"sampling_seed" if own else "seed": self.seed}
        return given | ({"ignore_eos": True} if self.ignore_eos else {})


class Endpoint:
    """One running server. Safe to use from several threads."""

    def __init__(self, url: str, engine: str, stall_s: float, key: str = "") -> None:
        """
        Args:
            url: without /v1.
            engine: sglang, vllm or other.
            stall_s: a server that sends nothing for so many seconds counts as lost.
            key: an API key.

        Raises:
            ValueError: the server lists no model.
        """
        self.url, self.engine, self.key, self._stall_s = url, engine, key, stall_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if engine == "other":
            headers["Connection"] = "close"  # llama.cpp's server ends connections that it has promised to keep
        timeout = httpx.Timeout(stall_s, connect=30.0)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, limits=CONNECTIONS)
        try:
            (model, *_) = self._http.get("/v1/models").raise_for_status().json()["data"]
            self.model: str = model["id"]
            self.context: int = model.get("max_model_len") or 0
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{url}/v1/models lists no model: {sentence(error, 300)}") from None

    def request(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        """The fields of a request that decide its answer.

        Raises:
            ValueError: the context has no room for an answer.
        """
        room = self.context - len(prompt) if self.context else sampling.max_new_tokens
        if room < 1:
            raise ValueError(f"the prompt has {len(prompt)} tokens, but the context has {self.context}")
        fields = sampling.fields(self.engine, room)
        if self.engine == "sglang":
            return {"input_ids": prompt, "sampling_params": fields}
        return {"prompt": prompt, **fields}

    def ask(self, prompt: list[int], sampling: Sampling, begin: float) -> Completion:
        """Requests one answer. A failure or refusal is part of it.

        Args:
            begin: value of `time.perf_counter()` from which the completion's times count.

        Raises:
            ServerError: the server sent nothing for `stall_s`.
        """
        start, times = time.perf_counter(), list[float]()
        content: dict[str, Any] = {"text": "", "output_ids": [], "meta_info": {}}
        failure = ""
        try:
            for event in self._events({**self.request(prompt, sampling), "stream": True}):
                if self.engine == "sglang" or event.get("error"):
                    content = event
                else:
                    _add(event, content)
                if self.engine == "sglang" or event.get("choices"):
                    times.append(time.perf_counter())
        except httpx.ReadTimeout:
            raise ServerError(f"the server sent no data for {self._stall_s:g} s (--stall-s)") from None
        except (httpx.HTTPError, ValueError) as error:
            failure = sentence(error, 300)
        found = Completion.from_generate(200, content)
        failure = failure or found.failure or found.refusal
        if not failure and not found.finish_reason:
            failure = "the answer is incomplete: it has no finish reason"
        first = times[0] - begin if times and found.tokens else None
        end = times[-1] if times else time.perf_counter()
        return replace(found, failure=failure, start_s=start - begin, first_s=first, end_s=end - begin)

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer's stream."""
        path = "/generate"
        if self.engine != "sglang":
            path = "/v1/completions"
            ids = {"return_token_ids": True} if self.engine == "vllm" else {}
            body = {**body, **ids, "model": self.model, "stream_options": {"include_usage": True}}
        with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")
            for line in response.iter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    yield json.loads(data)

    def flush(self) -> bool:
        """Empties the prefix cache; False if the server cannot do that."""
        if self.engine not in FLUSH:
            return False
        try:
            return self._http.post(FLUSH[self.engine]).status_code == 200
        except httpx.HTTPError:
            return False

    def counters(self) -> str:
        """The page with the server's own counters, which `serving.counters` reads; "" if it has none."""
        if self.engine not in COUNTERS:
            return ""
        try:
            response = self._http.get(COUNTERS[self.engine])
            return response.text if response.status_code == 200 else ""
        except httpx.HTTPError:
            return ""


def _add(event: dict[str, Any], content: dict[str, Any]) -> None:
    """Adds an event of /v1/completions to an answer in the form of SGLang's /generate."""
    meta = content["meta_info"]
    for choice in event.get("choices") or []:
        content["text"] += choice.get("text") or ""
        content["output_ids"] += choice.get("token_ids") or []
        if choice.get("finish_reason"):
            meta["finish_reason"] = {"type": choice["finish_reason"]}
    if usage := event.get("usage"):
        meta["prompt_tokens"], meta["completion_tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
        meta["cached_tokens"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

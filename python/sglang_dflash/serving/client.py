"""Queries a running SGLang server's native endpoint, which reports token ids and speculation per request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request.

    Fields:
        ids: the generated token ids.
        finish_reason: SGLang's type: "stop", "length" or "abort".
        cached_tokens: prompt tokens served from the radix cache.
        steps: verify steps; 0 where speculation is off.
        accept_histogram: steps by accept_len, 0 first; empty where speculation is off.
        meta: the reply's whole `meta_info`.
    """

    ids: list[int]
    text: str
    finish_reason: str
    cached_tokens: int
    steps: int
    accept_histogram: list[int]
    meta: dict[str, Any]

    @classmethod
    def from_response(cls, response: dict[str, Any]) -> Answer:
        meta = response["meta_info"]
        return cls(
            ids=response.get("output_ids", []),
            text=response["text"],
            finish_reason=meta["finish_reason"]["type"],
            cached_tokens=meta.get("cached_tokens", 0),
            steps=meta.get("spec_verify_ct", 0),
            accept_histogram=meta.get("spec_correct_drafts_histogram", []),
            meta=meta,
        )


class Client:
    """Client of one server. Requests are greedy by default. Safe to use from several threads."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=timeout_s, limits=httpx.Limits(max_connections=None))

    def generate(self, prompt: str | list[int], **sampling: Any) -> Answer:
        """One request; `prompt` is text or token ids, `sampling` SGLang's sampling parameters.

        Raises:
            httpx.HTTPStatusError: the server refused the request; the response holds its message.
        """
        response = self.post("/generate", _body(prompt, sampling))
        response.raise_for_status()
        return Answer.from_response(response.json())

    def generate_all(self, prompts: Sequence[str | list[int]], concurrency: int, **sampling: Any) -> list[Answer]:
        """All prompts, at most `concurrency` in flight; answers in the prompts' order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **sampling), prompts))

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(path, json=body)

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return self._http.get(path).raise_for_status().json()

    def flush_cache(self) -> None:
        """Empties the radix cache; the server must be idle."""
        self._http.post("/flush_cache").raise_for_status()

    def flush_when_idle(self, timeout_s: float = 30.0) -> None:
        """`flush_cache` as soon as the server is idle: an answer comes back a little before its request is gone."""
        deadline = time.monotonic() + timeout_s
        while self._http.post("/flush_cache").is_error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"The server was not idle within {timeout_s} s.")
            time.sleep(0.05)


def _body(prompt: str | list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    key = "text" if isinstance(prompt, str) else "input_ids"
    return {key: prompt, "sampling_params": {"temperature": 0.0, **sampling}}

"""Queries a running SGLang server's native endpoint, which reports token ids and speculation per request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from sglang_dflash.serving.completion import Completion
from sglang_dflash.serving.errors import ServerError, sentence
from sglang_dflash.serving.sessions import Message

BEST = 4  # number of alternatives per token that a baseline reports: a token outside them is no tie
STEADY = 6  # readings of the KV slots in use, until a count that does not fall is believed
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
"""As many as are asked for. A server closes one that was idle for 5 s; a request sent at that moment gets no answer."""


class Client:
    """Client of one server. Requests are greedy by default. Safe to use from several threads."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=timeout_s, limits=CONNECTIONS)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(path, json=body)

    def get(self, path: str) -> Any:
        """The JSON at `path`."""
        return self._http.get(path).raise_for_status().json()

    def get_text(self, path: str) -> str:
        """The text at `path`."""
        return self._http.get(path).raise_for_status().text

    def generate(self, prompt: str | list[int], **sampling: Any) -> Completion:
        """One request; `prompt` is text or token ids, `sampling` SGLang's sampling parameters.

        Raises:
            httpx.HTTPStatusError: the server refused the request; the response holds its message.
        """
        key = "text" if isinstance(prompt, str) else "input_ids"
        response = self.post("/generate", {key: prompt, "sampling_params": {"temperature": 0.0, **sampling}})
        return Completion.from_generate(200, response.raise_for_status().json())

    def generate_all(self, prompts: Sequence[str | list[int]], concurrency: int, **sampling: Any) -> list[Completion]:
        """All prompts, at most `concurrency` in flight; answers in the prompts' order."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **sampling), prompts))

    def ask(self, body: dict[str, Any]) -> Completion:
        """One request of POST /generate; a refusal or a failure is part of the completion.

        Raises:
            httpx.HTTPError: the server does not answer.
        """
        response = self.post("/generate", body)
        try:
            content = response.json()
        except ValueError:
            content = response.text
        return Completion.from_generate(response.status_code, content)

    def ask_all(
        self, bodies: Sequence[dict[str, Any]], concurrency: int, on_done: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """All bodies, at most `concurrency` in flight; completions in their order.

        Raises:
            httpx.HTTPError: the server does not answer; the remaining requests are not sent.
        """
        stop = threading.Event()

        def ask_one(body: dict[str, Any]) -> Completion:
            if stop.is_set():
                raise httpx.ConnectError("not sent")
            completion = self.ask(body)
            on_done()
            return completion

        # No `with`: leaving it waits for the requests in flight, and Ctrl-C must not wait for them.
        pool = ThreadPoolExecutor(concurrency)
        try:
            return list(pool.map(ask_one, bodies))
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def tokenize(self, prompt: str | Sequence[Message], template: dict[str, Any] | None = None) -> list[int]:
        """Token ids by the server's own tokenizer, and for messages by its chat template.

        Raises:
            ValueError: the server refuses the prompt; the message is the server's.
        """
        body: dict[str, Any] = {"prompt": prompt}
        if not isinstance(prompt, str):
            body = {"messages": [{"role": one.role, "content": one.content} for one in prompt]}
            body |= {"chat_template_kwargs": template} if template else {}
        response = self.post("/tokenize", body)
        if response.status_code != 200:
            raise ValueError(sentence(response.text))
        return list(response.json()["tokens"])

    def detokenize(self, tokens: Sequence[int]) -> dict[int, str]:
        """The text of each token; empty where the server has no tokenizer."""
        if not tokens:
            return {}
        response = self.post("/detokenize", {"tokens": [[one] for one in tokens], "skip_special_tokens": False})
        return dict(zip(tokens, response.json()["text"], strict=True)) if response.status_code == 200 else {}

    def logit_gap(self, ids: Sequence[int], one: int, other: int) -> float:
        """How far the lower of two tokens' logits lies below the best one behind `ids`.

        The prefix cache is emptied first, so the target computes them in a prefill, without drafts or verified rows.
        """
        self.post("/flush_cache?timeout=30", {}).raise_for_status()
        body = greedy_body(ids, max_new_tokens=1)
        body |= {"return_logprob": True, "top_logprobs_num": 1, "token_ids_logprob": [one, other]}
        meta = self.post("/generate", body).raise_for_status().json()["meta_info"]
        asked = {entry[1]: entry[0] for entry in meta["output_token_ids_logprobs"][0]}
        return meta["output_top_logprobs"][0][0][0] - min(asked[one], asked[other])

    def flush_cache(self) -> None:
        """Empties the radix cache; the server must be idle."""
        self._http.post("/flush_cache").raise_for_status()

    def flush_when_idle(self, timeout_s: float = 30.0) -> None:
        """`flush_cache` once the server is idle: an answer comes a little before its request is gone.

        This also returns leaked slots: count them first.

        Raises:
            ServerError: the server does not become idle.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.flush_cache()
            except httpx.HTTPStatusError:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"The server at {self.url} does not become idle, so its radix cache cannot be emptied."
                    ) from None
            time.sleep(0.05)

    def used_slots(self, floor: int = 0, patience_s: float = 20.0) -> int | None:
        """Number of KV slots in use that belong to no request and not to the radix cache; None if the server stays
        busy.

        The server frees a request's slots shortly after its answer. So the count is read until it is `floor` or less,
        or has not fallen over `STEADY` readings: on a busy machine some of them hold the slot of the request that makes
        the scheduler publish.

        Raises:
            httpx.HTTPError: the server does not answer.
        """
        deadline = time.monotonic() + patience_s
        seen: list[int] = []
        published = 0.0
        while time.monotonic() < deadline:
            self.ask(greedy_body([1], max_new_tokens=1))  # makes the scheduler publish its load again
            loads = self.get("/v1/loads")["loads"]
            before, published = published, max(load["timestamp"] for load in loads)
            if published > before and not any(load["num_running_reqs"] for load in loads):
                seen.append(sum(load["num_used_tokens"] for load in loads))
                steady = len(seen) >= STEADY and seen[-STEADY:] == sorted(seen[-STEADY:])
                if seen[-1] <= floor or steady:
                    return seen[-1]
            time.sleep(0.3)
        return None


def greedy_body(input_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
    """The body of POST /generate."""
    return {"input_ids": list(input_ids), "sampling_params": {"temperature": 0.0, **sampling}}


def with_best(body: dict[str, Any]) -> dict[str, Any]:
    """The body for a baseline, which must also report the most likely tokens."""
    return {**body, "return_logprob": True, "top_logprobs_num": max(BEST, body.get("top_logprobs_num", 0))}

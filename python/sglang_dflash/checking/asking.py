"""Sends requests and reads their outcomes: an answer, a refusal with the server's message, or a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from sglang_dflash.serving import Client

BEST = 4  # number of alternatives per token that the off arm reports: a token outside them is no tie


@dataclass(frozen=True, slots=True)
class Request:
    """One request of one case.

    Fields:
        case: the name of the case it belongs to.
        prompt_id: names the prompt in reports.
        body: of POST /generate; always has `input_ids` and `sampling_params`.
    """

    case: str
    prompt_id: str
    body: dict[str, Any]

    @property
    def sampled(self) -> bool:
        return self.body["sampling_params"].get("temperature", 1.0) > 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request.

    Fields:
        ids, text: the answer.
        finish: SGLang's finish reason, with all its fields.
        logprobs: of `ids`; empty if none were requested.
        best: per token, the most likely (id, logprob) at its position, best first; empty if none were requested.
        cached_tokens: prompt tokens served from the radix cache.
        histogram: verify steps by accept_len, 0 first; empty where speculation is off.
        adapts: the server chose a width per step, so the number of steps does not show how good the drafts were.
        refusal: the server's message if it answered 4xx; all other fields are empty then.
        failure: the error if the server failed or aborted the request; a part of the answer may exist.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: dict[str, Any] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    best: list[list[tuple[int, float]]] = field(default_factory=list)
    cached_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    adapts: bool = False
    refusal: str = ""
    failure: str = ""

    @property
    def answered(self) -> bool:
        return not self.refusal and not self.failure

    @property
    def steps(self) -> int:
        return sum(self.histogram)

    @classmethod
    def from_response(cls, status: int, content: Any) -> Outcome:
        """
        Args:
            status: HTTP status code.
            content: the response's JSON, or its text if it is not JSON.
        """
        if 400 <= status < 500:
            return cls(refusal=_sentence(content))
        if status != 200 or "meta_info" not in content:
            return cls(failure=f"HTTP {status}: {_sentence(content)}")
        meta = content["meta_info"]
        finish = meta["finish_reason"] or {}
        failure = ""
        if finish.get("type") == "abort":
            failure = str(finish.get("message") or "aborted")
            if 400 <= (finish.get("status_code") or 500) < 500:
                return cls(refusal=failure)
        return cls(
            ids=content.get("output_ids", []),
            text=content["text"],
            finish=finish,
            failure=failure,
            logprobs=[row[0] for row in meta.get("output_token_logprobs") or []],
            best=[[(row[1], row[0]) for row in rows] for rows in meta.get("output_top_logprobs") or []],
            cached_tokens=meta.get("cached_tokens", 0),
            histogram=meta.get("spec_correct_drafts_histogram") or [],
            adapts=bool(meta.get("spec_cap_lens_histogram")),
        )

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Outcome:
        return cls(**{**row, "best": [[(token, value) for token, value in rows] for rows in row.get("best", [])]})

    def to_json(self) -> dict[str, Any]:
        """Leaves out empty fields."""
        return {name: value for name, value in asdict(self).items() if value}


def _sentence(content: Any) -> str:
    """The message of an error response, in either of SGLang's two formats."""
    if isinstance(content, dict):
        error = content.get("error", content)
        content = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(content).split())


def greedy_body(input_ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
    return {"input_ids": list(input_ids), "sampling_params": {"temperature": 0.0, **sampling}}


def with_best(body: dict[str, Any]) -> dict[str, Any]:
    """The body for the off arm, which must also report the most likely tokens."""
    return {**body, "return_logprob": True, "top_logprobs_num": max(BEST, body.get("top_logprobs_num", 0))}


def ask(client: Client, body: dict[str, Any]) -> Outcome:
    """
    Raises:
        httpx.HTTPError: the server does not answer.
    """
    response = client.post("/generate", body)
    try:
        content = response.json()
    except ValueError:
        content = response.text
    return Outcome.from_response(response.status_code, content)


def ask_all(
    client: Client,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """All bodies, at most `concurrency` in flight; outcomes in their order.

    Raises:
        httpx.HTTPError: the server does not answer; the remaining requests are not sent.
    """
    stop = threading.Event()

    def ask_one(body: dict[str, Any]) -> Outcome:
        if stop.is_set():
            raise httpx.ConnectError("not sent")
        outcome = ask(client, body)
        on_done()
        return outcome

    # No `with`: leaving it waits for the requests in flight, and Ctrl-C must not wait for them.
    pool = ThreadPoolExecutor(concurrency)
    try:
        return list(pool.map(ask_one, bodies))
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)

"""A toy model and its client: they answer like a server, at once, with the faults that a test orders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sglang_dflash.core.row_counts import STATE, RowCounts
from sglang_dflash.serving import Client

END, VOCABULARY = 9, 10
Change = Callable[[dict[str, Any], list[int]], list[int] | None]


def next_id(ids: Sequence[int]) -> int:
    """The toy model's most likely token, by an arbitrary rule. Every seventh position is the end token."""
    return END if len(ids) % 7 == 0 else sum((i + 1) * token for i, token in enumerate(ids)) % END


@dataclass
class Faults:
    """The faults of a toy server.

    Fields:
        change: maps the request's body and the right ids to the ids of the answer; None: an internal error.
        refuse: sampling parameters that the server refuses.
        leak: KV slots that each request leaks.
        dies_after: number of requests after which the server is gone.
        gap: between the logprobs of the two best tokens.
        steps: maps the number of cached prompt tokens to the request's verify steps.
        adapts: steps have widths of their own, in two replicas.
    """

    change: Change = lambda body, ids: ids
    refuse: Sequence[str] = ()
    leak: int = 0
    dies_after: int = 10**9
    gap: float = 1.0
    steps: Callable[[int], int] = lambda cached: 2
    adapts: bool = False


@dataclass
class ToyClient(Client):
    """Replaces `Client`; caches whole prompts, like a radix tree."""

    speculative: bool
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self.url = "toy"
        self._lock = threading.Lock()
        self._cached: list[list[int]] = []
        self._asked = self._leaked = self._infos = 0

    def get(self, path: str) -> Any:
        if path == "/v1/loads":
            load = {"timestamp": time.time() + 1, "num_running_reqs": 0, "num_used_tokens": self._leaked}
            return {"loads": [load]}
        info = {"model_path": "/nowhere/toy", "version": "1", "dtype": "float32", "disable_overlap_schedule": True}
        self._infos += 1  # the counts rise from each time they are read to the next
        counts = RowCounts(10 * self._infos, 8 * self._infos, 16 * self._infos, 8.0 * self._infos, 4 * self._infos)
        states = [{STATE: asdict(counts)}] * 2 if self.faults.adapts else [{}]
        return {
            **info,
            "speculative_algorithm": "DFLASH" if self.speculative else None,
            "internal_states": states,
        }

    def flush_cache(self) -> None:
        self._cached, self._leaked = [], 0

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "/tokenize":
            text = body.get("prompt") or body["messages"][0]["content"]
            return httpx.Response(200, json={"tokens": [ord(letter) % END for letter in text]})
        if path == "/detokenize":
            return httpx.Response(200, json={"text": [f"<{ids[0]}>" for ids in body["tokens"]]})
        with self._lock:
            return self._generate(body)

    def _generate(self, body: dict[str, Any]) -> httpx.Response:
        self._asked += 1
        if self._asked > self.faults.dies_after:
            raise httpx.ConnectError("gone")
        sampling = body["sampling_params"]
        for name in self.faults.refuse:
            if name in sampling:
                return httpx.Response(400, json={"error": {"message": f"{name} is not served here."}})
        prompt = body["input_ids"]
        self._leaked += self.faults.leak
        cached = max((shared(prompt, other) for other in self._cached), default=0)
        ids = self.faults.change(body, continue_ids(prompt, sampling))
        if ids is None:
            return httpx.Response(500, text="Internal Server Error")
        self._cached.append([*prompt, *ids])
        return httpx.Response(200, json=self._response(body, ids, min(cached, len(prompt) - 1)))

    def _response(self, body: dict[str, Any], ids: list[int], cached: int) -> dict[str, Any]:
        meta: dict[str, Any] = {"finish_reason": {"type": "stop"}, "cached_tokens": cached}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.1, token, None] for token in ids]
            second = -0.1 - self.faults.gap
            meta["output_top_logprobs"] = [[[-0.1, token, None], [second, (token + 1) % END, None]] for token in ids]
        if self.speculative:
            meta["spec_correct_drafts_histogram"] = [0, 0, self.faults.steps(cached)]
            meta["spec_cap_lens_histogram"] = [0, 1, 2] if self.faults.adapts else []
        return {"text": "".join(f"<{token}>" for token in ids), "output_ids": ids, "meta_info": meta}


def continue_ids(prompt: Sequence[int], sampling: dict[str, Any]) -> list[int]:
    """The greedy answer; the toy knows only max_new_tokens and ignore_eos."""
    ids = list(prompt)
    for _ in range(sampling.get("max_new_tokens", 8)):
        ids.append(next_id(ids))
        if ids[-1] == END and not sampling.get("ignore_eos"):
            break
    return ids[len(prompt) :]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass
class ToyServer:
    """Replaces `Server`."""

    toy: ToyClient

    def client(self) -> ToyClient:
        return self.toy


@dataclass
class ToyArm:
    """Replaces `Arm`."""

    client: ToyClient
    may_flush: bool = True
    whole_blocks: ToyArm | None = None

    @contextmanager
    def up(self, log: Path, timeout_s: float, on_wait: Callable[[float], None]) -> Iterator[ToyServer]:
        yield ToyServer(self.client)

    def with_whole_blocks(self) -> ToyArm | None:
        return self.whole_blocks

    def why_gone(self, log: Path) -> str:
        return "toy error"

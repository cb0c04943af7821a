"""A server without a model: it answers at once, and accepts as many drafts as a test orders."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK = 8
OF_THINKING = [7]  # what the chat template adds with thinking on
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of POST /generate, as the order sees it."""

    text: str
    tokens: int
    cached: int
    thinks: bool
    temperature: float


@dataclass
class Orders:
    """
    Fields:
        accepted: drafts that each step of this request accepts, 0 to BLOCK - 1; between two numbers: their mean.
        info: more of `/server_info`; `internal_states` among it.
        thinks: whether the template thinks by default; None: it has no switch.
        seconds: of a token.
        retractions: of every request.
        metrics: the text of `/metrics`; None: there is none.
        width: rows of every step, where widths adapt; 0: whole blocks.
        refuses: why every request is refused; "" for no reason.
    """

    accepted: Callable[[Request], float] = lambda request: 5.0
    info: Json = field(default_factory=dict)
    thinks: bool | None = None
    seconds: float = 0.01
    retractions: int = 0
    metrics: str | None = None
    width: int = 0
    refuses: str = ""
    speculates: bool = True
    held: list[list[int]] = field(default_factory=list)

    def server_info(self) -> Json:
        speculation = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": BLOCK}
        return {
            "model_path": "/nowhere/target",
            "speculative_draft_model_path": "/nowhere/draft",
            "version": "0.5.23",
            "dtype": "float32",
            "max_req_input_len": 4096,
            "chunked_prefill_size": 8192,
            "internal_states": [{"dflash_prefilled": 0}],
            **(speculation if self.speculates else {}),
            **self.info,
        }

    def tokenize(self, body: Json) -> list[int]:
        said = body.get("messages") or [{"role": "", "content": body.get("prompt")}]
        ids = [ord(letter) for one in said for letter in f"{one['role']}:{one['content']}\n"]
        asked = (body.get("chat_template_kwargs") or {}).get("enable_thinking", self.thinks)
        return ids + OF_THINKING if self.thinks is not None and asked else ids

    def generate(self, body: Json) -> Json:
        ids, sampling = body["input_ids"], body["sampling_params"]
        cached = max((_shared(ids, other) for other in self.held), default=0)
        self.held.append(ids)
        text = "".join(map(chr, ids))
        request = Request(text, len(ids), cached, ids[-1:] == OF_THINKING, sampling["temperature"])
        count = sampling["max_new_tokens"]
        answer = [ord("a") + (sum(ids) + place) % 26 for place in range(count)]
        meta: Json = {"finish_reason": {"type": "length"}, "prompt_tokens": len(ids), "completion_tokens": count}
        meta |= {"cached_tokens": cached, "e2e_latency": 0.1 + self.seconds * count}
        meta |= self._speculation(request, count) if self.speculates else {}
        if self.retractions:
            meta["num_retractions"] = self.retractions
        return {"text": "".join(map(chr, answer)), "output_ids": answer, "meta_info": meta}

    def _speculation(self, request: Request, count: int) -> Json:
        accepted = self.accepted(request)
        steps = max(1, round((count - 1) / (1 + accepted)))
        histogram = [0] * BLOCK
        more = round(steps * (accepted - int(accepted)))
        histogram[int(accepted)] += steps - more
        histogram[min(int(accepted) + 1, BLOCK - 1)] += more
        meta = {"spec_verify_ct": steps, "spec_correct_drafts_histogram": histogram}
        meta |= {"spec_num_proposed_drafts": steps * (BLOCK - 1)}
        return meta | ({"spec_cap_lens_histogram": [*[0] * self.width, steps]} if self.width else {})


def _shared(ids: list[int], other: list[int]) -> int:
    """Tokens of the prefix cache for `ids`: the last one is always computed."""
    same = next((place for place, pair in enumerate(zip(ids, other, strict=False)) if len({*pair}) > 1), None)
    return min(len(ids) - 1, len(other) if same is None else same)


@contextmanager
def serve(orders: Orders) -> Iterator[str]:
    """The URL of a server that follows the orders."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            pages = {"/server_info": json.dumps(orders.server_info()), "/metrics": orders.metrics}
            self._send(pages.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if self.path == "/flush_cache":
                orders.held.clear()
                self._send("{}")
            elif self.path == "/tokenize":
                self._send(json.dumps({"tokens": orders.tokenize(body)}))
            elif orders.refuses:
                self._send(json.dumps({"error": {"message": orders.refuses}}), 400)
            else:
                self._send(json.dumps(orders.generate(body)))

        def _send(self, text: str | None, status: int = 200) -> None:
            content = (text or "").encode()
            self.send_response(404 if text is None else status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)  # looks for its end so often
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

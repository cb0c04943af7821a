"""A server without a model, at SGLang's own endpoint and at OpenAI's: known tokens at known times, faults on demand."""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTEXT = 512


def answer_ids(prompt: list[int], count: int) -> list[int]:
    """The answer's token ids, a function of the prompt alone."""
    return [(sum(prompt) + 7 * index) % 1000 for index in range(count)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace
    lock = threading.Lock()
    asked = 0
    computed = 0  # prompt tokens that were not in the cache

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        info: dict[str, Any] = {"model_path": "fake", "dtype": self.options.dtype, "version": "0"}
        info |= {"asked": Handler.asked, "internal_states": [{"dflash_prefilled": Handler.computed}]}
        models = {"data": [{"id": "fake", "max_model_len": CONTEXT}]}
        self._json({"/health": {}, "/v1/models": models, "/server_info": info}.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path.startswith("/flush_cache"):
            self._json({})
        elif "token_ids_logprob" in body:
            self._gap(*body["token_ids_logprob"])
        elif self.path == "/generate":
            self._answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        elif self.path == "/v1/completions":
            self._answer(body["prompt"], body["max_tokens"])
        else:
            self._json(None)

    def _gap(self, one: int, other: int) -> None:
        """Reports one token as the best, and the other `--gap` below it."""
        both = [[-1.0, one, None], [-1.0 - self.options.gap, other, None]]
        self._json({"text": "", "meta_info": {"output_top_logprobs": [both[:1]], "output_token_ids_logprobs": [both]}})

    def _answer(self, prompt: list[int], count: int) -> None:
        options = self.options
        with Handler.lock:
            Handler.asked += 1
            Handler.computed += len(prompt) - 4
            number = Handler.asked
        if options.refuse_every and number % options.refuse_every == 0:
            return self._json({"error": {"message": "not this one"}}, 400)
        ids = answer_ids(prompt, count)
        if options.wrong_from is not None:
            ids = [token + 1 if index >= options.wrong_from else token for index, token in enumerate(ids)]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        time.sleep(options.first_ms / 1e3)
        for end in range(options.chunk, len(ids) + options.chunk, options.chunk):
            if number == options.die_at and end > options.chunk:
                print("the fake server falls over", flush=True)
                self.connection.shutdown(socket.SHUT_RDWR)
                os._exit(3)
            if end > options.chunk:
                time.sleep(options.step_ms / 1e3)
            self._event(prompt, ids[:end], end - options.chunk, len(ids))
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, prompt: list[int], ids: list[int], begin: int, whole: int) -> None:
        done, steps = len(ids) == whole, -(-whole // self.options.chunk)
        if self.path == "/generate":
            meta: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "cached_tokens": 4}
            if done:
                meta["finish_reason"] = {"type": "length"}
            if done and self.options.chunk > 1:
                histogram = [0] * (self.options.chunk - 1) + [steps]
                meta |= {"spec_verify_ct": steps, "spec_correct_drafts_histogram": histogram}
            event = {"text": "".join(f" {token}" for token in ids), "output_ids": ids, "meta_info": meta}
        else:
            text = "".join(f" {token}" for token in ids[begin:])
            event = {"choices": [{"text": text, "finish_reason": "length" if done else None}]}
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _json(self, content: dict[str, Any] | None, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(404 if content is None else status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--first-ms", type=float, default=0.0, help="delay of the first chunk")
    parser.add_argument("--step-ms", type=float, default=0.0, help="delay between chunks")
    parser.add_argument("--chunk", type=int, default=1, help="tokens per chunk")
    parser.add_argument("--gap", type=float, default=1.0, help="gap between the logits of two tokens")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wrong-from", type=int, help="index of the first wrong token")
    parser.add_argument("--die-at", type=int, help="number of the request during which the process ends")
    parser.add_argument("--refuse-every", type=int, help="a request whose number is a multiple gets a 400")
    parser.add_argument("--refuse-start", action="store_true")
    parser.add_argument("--hang-start", action="store_true", help="never answers")
    parser.add_argument("--mark", help="a word by which a test finds this process")
    return parser


def main() -> None:
    Handler.options = make_parser().parse_args()
    if Handler.options.refuse_start:
        print("ValueError: this server does not want to start", flush=True)
        raise SystemExit(1)
    while Handler.options.hang_start:
        time.sleep(1.0)
    ThreadingHTTPServer((Handler.options.host, Handler.options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

"""Runs an OpenAI-compatible server without a model: known tokens at known times, and faults on demand."""

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
        pages = {
            "/health": {},
            "/v1/models": {"data": [{"id": "fake", "max_model_len": CONTEXT}]},
            "/server_info": self._info(),
        }
        self._json(pages.get(self.path))

    def _info(self) -> dict[str, Any]:
        """How often it was asked for completions; with `--counts`, what our worker reports since its start, too."""
        info = {"model_path": "fake", "dtype": self.options.dtype, "version": "0", "asked": Handler.asked}
        return {**info, "internal_states": [{"dflash_prefilled": Handler.computed}]} if self.options.counts else info

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path.startswith("/flush_cache"):
            self._json({})
        elif self.path == "/generate":
            self._gap(body)
        elif self.path == "/v1/completions":
            self._complete(body)
        elif self.path == "/v1/chat/completions":
            self._chat(body)
        else:
            self._json(None)

    def _gap(self, body: dict[str, Any]) -> None:
        """Reports one token as the best, and the other `--gap` below it."""
        one, other = body["token_ids_logprob"]
        meta = {
            "output_top_logprobs": [[[-1.0, one, None]]],
            "output_token_ids_logprobs": [[[-1.0, one, None], [-1.0 - self.options.gap, other, None]]],
        }
        self._json({"text": "", "meta_info": meta})

    def _chat(self, body: dict[str, Any]) -> None:
        """Answers a user with a tool call in pieces, and a tool result without one; one prompt token per character."""
        asked = body["messages"]
        prompt = [ord(letter) for message in asked for letter in f"{message['role']}:{message['content']}\n"]
        prompt += [0] * self.options.more_prompt
        if not body["tools"] or (asked[-1]["role"] == "tool" and not asked[-2]["tool_calls"]):
            return self._json({"error": {"message": "a result needs a call, and a call its tools"}}, 400)
        ids = answer_ids(prompt, body["max_tokens"])
        self._begin_stream()
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"content": "I will."}]
        if asked[-1]["role"] == "user":
            begun = {"index": 0, "id": f"call-{len(asked)}", "type": "function", "function": {"name": "read"}}
            pieces = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"path": ', '"a"}')]
            pieces = pieces[:1] if self.options.cut_calls else pieces
            deltas += [{"tool_calls": [call]} for call in (begun, *pieces)]
        for delta in deltas:
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "sglext": {"output_ids": [ids]}})
        self._event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()

    def _complete(self, body: dict[str, Any]) -> None:
        with Handler.lock:
            Handler.asked += 1
            Handler.computed += len(body["prompt"]) - 4
            number = Handler.asked
        if self.options.refuse_every and number % self.options.refuse_every == 0:
            return self._json({"message": "not this one"}, 400)
        ids = answer_ids(body["prompt"], body["max_tokens"])
        if self.options.wrong_from is not None:
            ids = [token + 1 if index >= self.options.wrong_from else token for index, token in enumerate(ids)]
        self._begin_stream()
        time.sleep(self.options.first_ms / 1e3)
        for start in range(0, len(ids), self.options.chunk):
            if number == self.options.die_at and start:
                print("the fake server falls over", flush=True)
                self.connection.shutdown(socket.SHUT_RDWR)
                time.sleep(self.options.dying_ms / 1e3)
                os._exit(3)
            if number == self.options.stall_at and start:
                time.sleep(60)
            if start:
                time.sleep(self.options.step_ms / 1e3)
            chunk = ids[start : start + self.options.chunk]
            reason = "length" if start + self.options.chunk >= len(ids) else None
            text = "".join(f" {token}" for token in chunk)
            self._event({"choices": [{"text": text, "token_ids": chunk, "finish_reason": reason}]})
        steps = -(-len(ids) // self.options.chunk)
        details = {
            "spec_verify_ct": steps,
            "spec_num_proposed_drafts": steps * self.options.chunk,
            "spec_correct_drafts_histogram": [0] * (self.options.chunk - 1) + [steps],
        }
        if self.options.chunk > 1:
            self._event({"choices": [], "sglext": {"spec_tokens_details": details}})
        cached = {"device": 3, "host": 1}
        self._event({"choices": [], "sglext": {"cached_tokens_details": cached}})
        self._event({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
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
    parser.add_argument("--gap", type=float, default=1.0, help="gap between the logits of the two tokens of /generate")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--wrong-from", type=int, help="index of the first wrong token")
    parser.add_argument("--die-at", type=int, help="number of the request during which the process ends")
    parser.add_argument("--dying-ms", type=float, default=0.0, help="time from its last byte to its end")
    parser.add_argument("--stall-at", type=int, help="number of the request whose stream stops for 60 s")
    parser.add_argument("--refuse-every", type=int, help="a request whose number is a multiple gets a 400")
    parser.add_argument("--counts", action="store_true", help="report a worker's counter in /server_info")
    parser.add_argument("--cut-calls", action="store_true", help="the arguments of tool calls end early")
    parser.add_argument("--more-prompt", type=int, default=0, help="tokens that its chat template adds")
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

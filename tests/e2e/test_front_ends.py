"""What stands between a client and the scheduler: strict thinking, several tokenizer processes, gRPC."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from arms import EVERY_WIDTH, MAX_NEW_TOKENS, PLAIN, POOL, SPECULATE, Baseline
from baseline import chat_ids
from transformers import PreTrainedTokenizerBase

from equality import assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, Client, Completion, Server, greedy_body, held_out_prompts
from sglang_dflash.serving.server import _free_port

pytestmark = pytest.mark.server
STRICT = ["--reasoning-parser", "qwen3", "--enable-strict-thinking"]
ANSWER = {"max_new_tokens": 64}
# Thoughts that end by themselves, behind so many tokens, at once; then in a grammar; and no thoughts.
THINKING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"require_reasoning": True}),
    ({}, {"require_reasoning": True, "max_thinking_tokens": 20}),
    ({}, {"require_reasoning": True, "max_thinking_tokens": 0}),
    ({"regex": "[0-9 +=]{5,30}\\."}, {"require_reasoning": True, "max_thinking_tokens": 9}),
    ({"regex": "[0-9 +=]{5,30}\\."}, {"require_reasoning": True}),
    ({"frequency_penalty": 1.5}, {"require_reasoning": True, "max_thinking_tokens": 33}),
    ({}, {}),
]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Bodies of requests, and what they get alone with speculation off."""

    bodies: list[dict[str, Any]]
    answers: list[Completion]


@pytest.fixture(scope="module")
def thoughts(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Thoughts:
    asked = [chat_ids(tokenizer, [{"role": "user", "content": one.prompt}]) for one in held_out_prompts()[::40][:3]]
    bodies = [{**greedy_body(prompt, **ANSWER, **sampling), **more} for prompt in asked for sampling, more in THINKING]
    log = tmp_path_factory.mktemp("thoughts") / "off.log"
    flags = [*PLAIN, *POOL, *STRICT, "--disable-overlap-schedule"]
    with PreloadedServer(flags, log, TINY_ENVIRONMENT) as server:
        client = server.client()
        best = {"return_logprob": True, "top_logprobs_num": 2}
        return Thoughts(bodies, [client.ask({**body, **best}) for body in bodies])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With speculation on, two tokenizer processes, and widths in turn."""
    flags = [*PLAIN, *POOL, *SPECULATE, *STRICT, "--tokenizer-worker-num", "2"]
    log = tmp_path_factory.mktemp("tokenizers") / "on.log"
    with PreloadedServer(flags, log, TINY_ENVIRONMENT | EVERY_WIDTH) as running:
        yield running


def test_strict_thinking(server: Server, thoughts: Thoughts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Fails where a row's filter of thoughts is another row's, a budget counts drafts that were not accepted, or
    thoughts are not filtered at all."""
    client = server.client()
    for concurrency in (1, 8):
        answers = client.ask_all(thoughts.bodies, concurrency)
        assert_equal_tokens(answers, thoughts.answers, [json.dumps(body)[-160:] for body in thoughts.bodies])
    assert tau(answers) > 1.1
    cut = [
        (answer, body["max_thinking_tokens"])
        for answer, body in zip(answers, thoughts.bodies, strict=True)
        if "max_thinking_tokens" in body
    ]
    for answer, budget in cut:
        thought, end, _ = answer.text.partition("</think>")
        assert end and len(tokenizer(thought)["input_ids"]) <= budget + 1, answer.text


def test_tokenizer_processes(server: Server, baseline: Baseline) -> None:
    """Fails where a tokenizer process answers without our plugin: it would not refuse what ends the scheduler, or would
    cut streams into other pieces; also where only one process answers."""
    prompts, expected = baseline.prompts[:12], baseline.answers[:12]

    def alone(body: dict[str, Any]) -> httpx.Response:
        """Over a connection of its own, which any of the processes may take."""
        return httpx.post(f"{server.url}/generate", json=body, timeout=120)

    bodies = [greedy_body(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = [Completion.from_generate(reply.status_code, reply.json()) for reply in pool.map(alone, bodies)]
        refused = list(pool.map(alone, [{**bodies[0], "top_logprobs_num": -5}] * 24))
    assert_equal_tokens(answers, expected, prompts)
    assert all(reply.status_code == 400 and "top_logprobs_num is -5" in reply.text for reply in refused)
    log = server.log.read_text()
    assert log.count("Start multi-tokenizer worker process") == 2


def message(text: bytes) -> bytes:
    """Protocol buffers: a message whose field 1 is `text`."""
    length, head = len(text), bytearray(b"\x0a")
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    return bytes(head) + bytes([length]) + text


def fields(data: bytes) -> dict[int, Any]:
    """The fields of a message: numbers, and texts."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                return value, at

    found: dict[int, Any] = {}
    at = 0
    while at < len(data):
        key, at = number(at)
        value, at = number(at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        found[key >> 3] = value
    return found


def test_grpc(baseline: Baseline, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Fails where an answer over gRPC differs from that over HTTP, or a request is not checked there."""
    port = _free_port()
    flags = [*PLAIN, *POOL, *SPECULATE, "--grpc-port", str(port)]
    with PreloadedServer(flags, tmp_path / "log", TINY_ENVIRONMENT) as server:
        http: Client = server.client()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            complete = channel.unary_stream("/sglang.runtime.v1.SglangService/Complete")

            def ask(prompt: list[int]) -> dict[str, Any]:
                body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": MAX_NEW_TOKENS}
                chunks = [fields(chunk) for chunk in complete(message(json.dumps(body).encode()), timeout=120)]
                return json.loads(b"".join(chunk.get(1, b"") for chunk in chunks))

            for prompt, expected in zip(baseline.prompts[:6], baseline.answers[:6], strict=True):
                assert ask(prompt)["choices"][0]["text"] == expected.text
            assert "1000000" in str(ask([5, 10**6]))
            assert http.generate("Hello", max_new_tokens=2).ids, "a refused request ended the server"

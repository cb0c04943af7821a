"""The gateway `smg` before two servers: the same tokens, conversations stay where they are cached, a server may end."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from arms import PLAIN, POOL, SPECULATE, pick

from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, Client, Completion, Server, held_out_prompts
from sglang_dflash.serving.server import _free_port, stop_all

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        importlib.util.find_spec("smg") is None, reason="the gateway is not installed (pip install smg==1.13.0)"
    ),
]
NAME, ANSWER = "tiny", 32
# Text that many conversations begin with would send them all to one server: these begin differently. Their number is
# odd, so that taking turns would send each second turn to the other server.
CONVERSATIONS = [f"{number}{number}. {one.prompt}" for number, one in enumerate(pick(held_out_prompts(), 3)[:7])]
BOUNDARY = 4  # tokens that a text may end with and a longer one split differently
TURNS = ["", "\nAnd then?", "\nWhy?"]


def talk(client: Client, texts: list[str], turn: str) -> list[Completion]:
    """Asks the next turn of every conversation, one after the other, and adds turn and answer to its text."""
    answers = []
    for number, text in enumerate(texts):
        asked = text + turn
        body = {"model": NAME, "text": asked, "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER}}
        response = client.post("/generate", body).raise_for_status()
        answers.append(Completion.from_generate(200, response.json()))
        texts[number] = asked + response.json()["text"]
    return answers


def prefills(server: Server) -> int:
    return server.log.read_text().count("Prefill batch")


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Server]]:
    flags = [*PLAIN, *POOL, *SPECULATE, "--served-model-name", NAME]
    servers: list[Server] = [PreloadedServer(flags, tmp_path / f"{n}.log", TINY_ENVIRONMENT) for n in range(2)]
    with ExitStack() as stack:
        stack.callback(stop_all, servers)
        for server in servers:
            server.launch()
        yield [server.wait(timeout_s=300) for server in servers]


def test_the_gateway_before_two_servers(replicas: list[Server], tmp_path: Path) -> None:
    """Fails where an answer through the gateway differs from a server's own, a conversation's second turn goes to the
    server that has not cached its first, one server gets everything, or requests fail once a server has ended."""
    survivor, doomed = replicas
    direct, expected = list(CONVERSATIONS), list[list[Completion]]()
    for turn in TURNS:
        expected.append(talk(survivor.client(), direct, turn))
    survivor.client().flush_when_idle()
    before = [prefills(server) for server in replicas]

    workers = ["--worker-urls", *(server.url for server in replicas), "--policy", "cache_aware"]
    flags = [*workers, "--health-check-interval-secs", "1", "--disable-tokenizer-autoload"]
    flags += ["--prometheus-port", str(_free_port())]
    launch = [sys.executable, "-m", "smg", "launch"]
    with Server(flags, tmp_path / "gateway.log", launch=launch, health="/readiness").start(60) as gateway:
        client, texts = gateway.client(60), list(CONVERSATIONS)
        deadline = time.monotonic() + 60
        while client.get("/readiness")["healthy_workers"] < 2:
            assert time.monotonic() < deadline, "the gateway does not find both servers"
            time.sleep(0.2)
        first, second = talk(client, texts, TURNS[0]), talk(client, texts, TURNS[1])
        shares = [prefills(server) - count for server, count in zip(replicas, before, strict=True)]
        assert all(share >= 4 for share in shares), f"requests by server: {shares}"
        for earlier, later in zip(first, second, strict=True):
            met = earlier.meta["prompt_tokens"] - BOUNDARY
            assert later.cached_tokens >= met, "a second turn went to the other server"
        doomed.terminate()
        assert doomed.ended(within_s=30)
        third = talk(client, texts, TURNS[2])
    got = [[one.ids for one in answers] for answers in (first, second, third)]
    assert got == [[one.ids for one in answers] for answers in expected]
    assert sum(one.steps for one in first) < sum(len(one.ids) for one in first), "nothing was drafted"

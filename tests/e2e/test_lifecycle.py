"""Requests that share, leave, return and overflow: KV slots are right, and all come back."""

from __future__ import annotations

import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from arms import MAX_NEW_TOKENS, Baseline, assert_equal_tokens, on_arms, tau, to_the_limit

from sglang_dflash.serving import Answer, Client, Server

pytestmark = pytest.mark.server


def assert_pool_empties(client: Client) -> None:
    """Fails where a KV slot stays in use although no request is left and the radix cache is flushed."""
    deadline = time.monotonic() + 20.0
    while True:
        try:
            client.flush_cache()  # refused while a request still runs
        except httpx.HTTPStatusError:
            assert time.monotonic() < deadline, "the server does not become idle"
        used = sum(load["num_used_tokens"] for load in client.get("/v1/loads")["loads"])
        if used == 0:
            return
        assert time.monotonic() < deadline, f"{used} slots are still in use"
        time.sleep(0.5)  # the scheduler publishes its load about once a second


@on_arms("default")
def test_conversation_hits_in_both_models(client: Client, server: Server, baseline: Baseline) -> None:
    """Fails where a turn's answer differs, its history is not cached, or the draft's KV of it is written again."""
    cached_before = 0
    for prompt, expected in baseline.conversation:
        log_start = server.log.stat().st_size
        answer = client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
        assert_equal_tokens([answer], [expected], [prompt])
        assert answer.cached_tokens >= cached_before
        with server.log.open() as log:
            log.seek(log_start)
            written = [int(n) for n in re.findall(r"draft KV of (\d+) prompt tokens written", log.read())]
        assert sum(written) == len(prompt) - answer.cached_tokens
        # All but the newest turn: its last tokens may be one short, since a prompt's last token is always run.
        cached_before = len(prompt) - 1
    assert answer.cached_tokens > 100
    assert tau([answer]) > 2.0, "a draft without the history's KV would guess badly"


@on_arms("default")
def test_aborted_requests_free_their_slots(client: Client, baseline: Baseline) -> None:
    """Fails where an abort disturbs another request's tokens or keeps KV slots."""
    assert_pool_empties(client)
    rng = random.Random(7)
    doomed = [f"doomed-{i}" for i in range(20)]

    def run_doomed(rid: str, prompt: list[int], delay: float) -> None:
        killer = threading.Timer(delay, lambda: client.post("/abort_request", {"rid": rid}))
        killer.start()
        body = {
            "rid": rid,
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
        }
        client.post("/generate", body)
        killer.join()

    threads = [
        threading.Thread(target=run_doomed, args=(rid, rng.choice(baseline.prompts), rng.uniform(0.02, 2.0)))
        for rid in doomed
    ]
    for thread in threads:
        thread.start()
    survivors = client.generate_all(baseline.prompts[::3], 4, max_new_tokens=MAX_NEW_TOKENS)
    for thread in threads:
        thread.join()
    assert_equal_tokens(survivors, baseline.answers[::3], baseline.prompts[::3])
    assert_pool_empties(client)


@on_arms("tiny-pool")
def test_context_limit_and_retraction(client: Client, baseline: Baseline) -> None:
    """Fails where a row overruns at the end of the context, or a retracted request comes back wrong."""
    assert_pool_empties(client)

    def run_on(prompt: list[int]) -> Answer:
        return client.generate(prompt, **to_the_limit(prompt))

    alone = [run_on(prompt) for prompt in baseline.long_prompts[:6]]
    assert_equal_tokens(alone, baseline.long_answers[:6], baseline.long_prompts[:6])
    with ThreadPoolExecutor(8) as pool:
        crowd = list(pool.map(run_on, baseline.long_prompts))
    assert_equal_tokens(crowd, baseline.long_answers, baseline.long_prompts)
    assert sum(answer.meta["num_retractions"] for answer in crowd) > 0, "nothing was retracted"
    assert sum(answer.finish_reason == "length" for answer in crowd) >= len(crowd) // 2, "few ran to the limit"
    assert_pool_empties(client)


@on_arms("default")
def test_idle_server_sleeps(client: Client, server: Server) -> None:
    """Fails where an idle server spins a core: it would take a whole second of CPU time per second."""
    client.generate("warm", max_new_tokens=4)
    time.sleep(1.0)

    def cpu_seconds() -> float:
        leader = psutil.Process(server.pid)
        times = [process.cpu_times() for process in (leader, *leader.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    before = cpu_seconds()
    time.sleep(3.0)
    assert cpu_seconds() - before < 1.0

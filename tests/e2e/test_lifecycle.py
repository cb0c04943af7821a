"""KV slots stay right, and all are freed, when requests share prefixes, abort, are retracted or fill the pool."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from arms import BLOCK_SIZE, MAX_NEW_TOKENS, PENALTIES, Baseline, assert_same_steps, on_arms, to_the_limit, widths_of
from reference_pair import ReferencePair

from equality import assert_equal_tokens
from sglang_dflash.serving import Client, Completion, Server

pytestmark = pytest.mark.server


def assert_pool_empties(client: Client) -> None:
    """Fails where a KV slot stays in use although no request is left.

    Slots of the radix cache can be evicted and do not count. Flushing would hide a leak, so nothing is flushed. The
    host also checks its pools for leaks whenever it is idle, and exits if it finds one.
    """
    begin, deadline = time.time(), time.monotonic() + 30.0
    while True:
        client.generate("Hello", max_new_tokens=1)  # makes the scheduler publish its load
        loads = client.get("/v1/loads")["loads"]
        fresh = [load for load in loads if load["timestamp"] > begin and not load["num_running_reqs"]]
        if fresh and not any(load["num_used_tokens"] for load in fresh):
            return
        assert time.monotonic() < deadline, f"slots stay in use: {loads}"
        time.sleep(1.0)


def draft_kv_writes(server: Server, log_start: int) -> list[int]:
    """Per prefill since `log_start`: how many prompt tokens' draft KV was computed, from the log."""
    with server.log.open() as log:
        log.seek(log_start)
        return [int(n) for n in re.findall(r"draft KV of (\d+) prompt tokens written", log.read())]


@on_arms("overlap")
def test_conversation_hits_in_both_models(client: Client, server: Server, baseline: Baseline) -> None:
    """Fails where a turn's answer differs, its history is not cached, or the draft's KV of it is written again."""
    history: list[int] = []  # ids whose KV earlier turns have written, by prefill or verified blocks
    for prompt, expected in baseline.conversation:
        log_start = server.log.stat().st_size
        answer = client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
        assert_equal_tokens([answer], [expected], [prompt])
        shared = next((i for i, (a, b) in enumerate(zip(history, prompt, strict=False)) if a != b), len(history))
        assert answer.cached_tokens >= shared
        assert sum(draft_kv_writes(server, log_start)) == len(prompt) - answer.cached_tokens
        history = [*prompt, *answer.ids[:-1]]  # the last token was committed but never run
    assert answer.cached_tokens > 100
    client.flush_when_idle()
    again = client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
    assert again.cached_tokens == 0
    assert again.accept_histogram == answer.accept_histogram, "cached draft KV gives other drafts than fresh KV"


@on_arms("pages")
def test_prompt_in_chunks(client: Client, server: Server, baseline: Baseline, oracle: ReferencePair) -> None:
    """Fails where a prompt of several chunks gets other tokens or drafts, or is not prefilled in chunks."""
    prompt, expected = baseline.conversation[-1]
    log_start = server.log.stat().st_size
    answer = client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)
    assert_equal_tokens([answer], [expected], [prompt])
    written = draft_kv_writes(server, log_start)
    assert sum(written) == len(prompt) > 128
    assert max(written) <= 64
    (alone,) = oracle.generate([prompt], MAX_NEW_TOKENS)
    assert_same_steps(answer, alone.commit_lens)


@on_arms("default", "overlap")
def test_aborted_requests_free_their_slots(client: Client, baseline: Baseline) -> None:
    """Fails where an abort disturbs another request's tokens, keeps KV slots, or does not end the request."""
    assert_pool_empties(client)
    rng = random.Random(7)

    def run_doomed(number: int) -> Completion:
        rid = f"doomed-{number}"
        killer = threading.Timer(rng.uniform(0.1, 2.0), lambda: client.post("/abort_request", {"rid": rid}))
        killer.start()
        sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
        prompt = rng.choice(baseline.prompts)
        response = client.post("/generate", {"rid": rid, "input_ids": prompt, "sampling_params": sampling})
        killer.join()
        assert response.status_code == 200, response.text
        return Completion.from_generate(200, response.json())

    with ThreadPoolExecutor(20) as pool:
        doomed = [pool.submit(run_doomed, number) for number in range(20)]
        survivors = client.generate_all(baseline.prompts[::3], 4, max_new_tokens=MAX_NEW_TOKENS)
    ends = [future.result() for future in doomed]
    assert sum(end.finish_reason == "abort" for end in ends) >= 15
    assert any(end.finish_reason == "abort" and end.meta["completion_tokens"] > 0 for end in ends)
    assert_equal_tokens(survivors, baseline.answers[::3], baseline.prompts[::3])
    assert_pool_empties(client)


def crowd_the_pool(
    run_on: Callable[[list[int]], Completion], prompts: list[list[int]], expected: list[Completion]
) -> list[Completion]:
    """Answers of prompts that are asked together, some of which the host retracts. Which ones depends on when they
    come: if none is retracted, they are asked again."""
    for _ in range(4):
        with ThreadPoolExecutor(8) as pool:
            crowd = list(pool.map(run_on, prompts))
        assert_equal_tokens(crowd, expected, prompts)
        if sum(answer.meta["num_retractions"] for answer in crowd):
            return crowd
    raise AssertionError("nothing was retracted")


@on_arms("tiny-pool", "tiny-pool-pages", "tiny-pool-compiled")
def test_context_limit_and_retraction(client: Client, baseline: Baseline) -> None:
    """Fails where a row exceeds the end of the context, or a retracted request continues wrongly."""
    assert_pool_empties(client)

    def run_on(prompt: list[int]) -> Completion:
        return client.generate(prompt, **to_the_limit(prompt))

    alone = [run_on(prompt) for prompt in baseline.long_prompts[:6]]
    assert_equal_tokens(alone, baseline.long_answers[:6], baseline.long_prompts[:6])
    crowd = crowd_the_pool(run_on, baseline.long_prompts, baseline.long_answers)
    assert sum(answer.finish_reason == "length" for answer in crowd) >= len(crowd) // 2, "few ran to the limit"
    assert_pool_empties(client)


@on_arms("tiny-pool-pages", "tiny-pool-compiled")
def test_every_width_occurs(client: Client, baseline: Baseline) -> None:
    """Fails where the tests of these arms do not take every width, and so show less than they say."""
    widths = widths_of(client, *baseline.prompts[:10])
    assert all(widths[1 : BLOCK_SIZE + 1]), widths


@on_arms("tiny-pool", "tiny-pool-pages")
def test_penalties_after_retraction(client: Client, baseline: Baseline) -> None:
    """Fails where a retracted request loses the penalty counts of its emitted tokens."""

    def run_on(prompt: list[int]) -> Completion:
        return client.generate(prompt, **to_the_limit(prompt), **PENALTIES)

    crowd_the_pool(run_on, baseline.long_prompts, baseline.penalised_answers)
    assert_pool_empties(client)


@on_arms("default")
def test_a_profile_is_taken(client: Client, tmp_path: Path) -> None:
    """Fails where SGLang's profiler, which asks the platform what to record, ends the server."""
    wanted = {"output_dir": str(tmp_path), "num_steps": 2, "activities": ["CPU"]}
    client.post("/start_profile", wanted).raise_for_status()
    answer = client.generate("1 + 1 =", max_new_tokens=24, ignore_eos=True)
    assert len(answer.ids) == 24
    deadline = time.monotonic() + 60.0
    while not list(tmp_path.rglob("*.trace.json.gz")):
        assert time.monotonic() < deadline, "no trace was written"
        time.sleep(0.5)


@on_arms("default")
def test_idle_server_sleeps(client: Client, server: Server) -> None:
    """Fails where an idle server busy-waits, which takes a second of CPU time per second."""
    client.generate("warm", max_new_tokens=4)
    time.sleep(1.0)

    def cpu_seconds() -> float:
        leader = psutil.Process(server.pid)
        times = [process.cpu_times() for process in (leader, *leader.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    before = cpu_seconds()
    time.sleep(3.0)
    assert cpu_seconds() - before < 1.0

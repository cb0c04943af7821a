"""The embedded pair through SGLang's own graph runner, with tapes in the place of CUDA graphs: static buffers, padded
batches, tail hook and both replays of a step are those of CUDA."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from arms import (
    ADMIT_ALL,
    FULL,
    PLAIN,
    SPECULATE,
    TINY_POOL,
    assert_same_steps,
    to_the_limit,
)
from plugins import graph_tape
from reference_pair import ReferencePair

from equality import assert_equal_tokens
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_OVERLAPPING, Client, Completion, Server

pytestmark = pytest.mark.server
HERE = Path(__file__).parent
GRAPHS = ["--cuda-graph-bs-decode", "1", "2", "4", "8", "--cuda-graph-backend-prefill", "disabled"]
QUICK_START = ["--enable-cudagraph-gc"]  # without it, the host collects garbage before and after each capture
TAPES = {
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "plugins"), os.environ.get("PYTHONPATH", "")]),
    "SGLANG_LOG_DECODE_GRAPH_KEY": "1",
}
ON = [*PLAIN, *SPECULATE, *TINY_POOL, *GRAPHS, *QUICK_START]
ENVIRONMENT = TINY_OVERLAPPING | ADMIT_ALL | FULL | TAPES
SHORT, BRIEF = 64, 4
"""Tokens of answers."""
TRIES = 10


@pytest.fixture(scope="module")
def steps(prompts: list[list[int]]) -> list[list[int]]:
    """Commit lengths of the reference's steps, for short answers to the first three prompts."""
    return [answer.commit_lens for answer in ReferencePair().generate(prompts[:3], SHORT)]


@pytest.fixture(scope="module")
def server(bug: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = ENVIRONMENT | {"GRAPH_TAPE_BUG": str(bug)}
    with PreloadedServer(ON, tmp_path_factory.mktemp("tape") / "server.log", environment) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Client:
    client = server.client()
    client.flush_when_idle()
    return client


def first(answer: Completion, count: int) -> Completion:
    """The answer to the same request with `max_new_tokens` of `count`."""
    if len(answer.ids) <= count:
        return answer
    return answer.cut(count)


def replays(server: Server, log_start: int = 0) -> Counter[tuple[str, int, int]]:
    """Replays since `log_start` by model, size of the graph and number of requests, from the host's own log."""
    with server.log.open() as log:
        log.seek(log_start)
        found = re.findall(r"replay: worker=(\w+) key_size=(\d+) \(bs\) mode=TARGET_VERIFY raw_bs=(\d+)", log.read())
    return Counter((model, int(size), int(requests)) for model, size, requests in found)


def finding(server: Server, prompts: list[list[int]], off: dict[str, list[Completion]], steps: list[list[int]]) -> str:
    """Runs four requests at once, of which one soon ends. Returns what is wrong with the others; "" if nothing is.

    On a busy machine the short request may end before the others have come. Then all run again.
    """
    for _ in range(TRIES):
        log_start = server.log.stat().st_size
        if found := wrong(server, prompts, off, steps):
            return found
        counts = replays(server, log_start)
        if counts["target", 4, 4] and counts["target", 4, 3]:
            return ""
    raise AssertionError(f"in {TRIES} runs the four requests were never in one batch of which one ended first")


def wrong(server: Server, prompts: list[list[int]], off: dict[str, list[Completion]], steps: list[list[int]]) -> str:
    """Runs the four requests once. Returns what is wrong with their tokens or steps; "" if nothing is.

    Wrong drafts cost no token, so tokens alone would not tell.
    """
    client, limits = server.client(timeout_s=60.0), [SHORT, SHORT, SHORT, BRIEF]
    client.flush_when_idle()

    def run(number: int) -> Completion:
        return client.generate(prompts[number], max_new_tokens=limits[number])

    try:
        with ThreadPoolExecutor(len(limits)) as pool:
            answers = list(pool.map(run, range(len(limits))))
    except httpx.HTTPError:
        found = re.findall(r"TapeError: (.*)", server.log.read_text())
        return found[0] if found else "the server ended"
    if [answer.ids for answer in answers] != [first(*pair).ids for pair in zip(off["plain"], limits, strict=False)]:
        return "other tokens"
    try:
        for answer, commit_lens in zip(answers, steps, strict=False):
            assert_same_steps(answer, commit_lens)
    except AssertionError:
        return "other steps"
    return ""


@pytest.mark.matrix  # SGLang's own switch is off
def test_a_plan_stream(
    bug: Path, tmp_path: Path, prompts: list[list[int]], off: dict[str, list[Completion]], steps: list[list[int]]
) -> None:
    """Fails where a step reads the drafts before the plan stream is joined: the draft's graph runs only then."""
    environment = ENVIRONMENT | {"GRAPH_TAPE_BUG": str(bug), "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}
    with PreloadedServer(ON, tmp_path / "server.log", environment) as server:
        assert finding(server, prompts, off, steps) == ""
        assert replays(server)["target", 4, 3] > 5


def test_three_requests_in_a_graph_of_four(
    server: Server, prompts: list[list[int]], off: dict[str, list[Completion]], steps: list[list[int]]
) -> None:
    """Fails where a padded batch commits other tokens, or takes other steps, than each request alone; or where one of
    the two models does not replay."""
    log_start = server.log.stat().st_size
    assert finding(server, prompts, off, steps) == ""
    counts = replays(server, log_start)
    assert counts["target", 4, 3] > 5 and counts["draft", 4, 3] > 5, counts


def test_requests_come_and_go(
    server: Server, client: Client, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where a batch that shrinks or grows between two replays mixes requests, or where a step is not replayed."""
    log_start = server.log.stat().st_size
    limits = [20 + 17 * (number * 5 % 7) for number in range(len(prompts))]

    def run(number: int) -> Completion:
        return client.generate(prompts[number], max_new_tokens=limits[number])

    with ThreadPoolExecutor(6) as pool:  # a request comes when another has gone; at last, they only go
        answers = list(pool.map(run, range(len(prompts))))
    assert_equal_tokens(answers, [first(*pair) for pair in zip(off["plain"], limits, strict=True)], prompts)
    counts = replays(server, log_start)
    assert len({size for _, size, _ in counts}) > 2 and any(requests < size for _, size, requests in counts), counts
    for model in ("target", "draft"):
        replayed = sum(requests * count for (who, _, requests), count in counts.items() if who == model)
        assert replayed >= sum(answer.steps for answer in answers)


def test_retraction(server: Server, client: Client, prompts: list[list[int]], off: dict[str, list[Completion]]) -> None:
    """Fails where a retracted request continues wrongly, or a replay reads slots that were given to another."""
    log_start = server.log.stat().st_size
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: client.generate(prompt, **to_the_limit(prompt)), prompts))
    assert_equal_tokens(answers, off["plain"], prompts)
    assert sum(answer.meta["num_retractions"] for answer in answers) > 0, "nothing was retracted"
    assert {size for _, size, requests in replays(server, log_start) if requests < size} >= {4, 8}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (graph_tape.STALE_DRAFTS, "other steps"),
        (graph_tape.REBOUND_IDS, "other tokens"),
        (graph_tape.LIVE_PADDING, "a replay wrote slots that the batch does not own"),  # ends the server: the last
    ],
)
def test_a_planted_bug_is_found(
    name: str,
    found: str,
    bug: Path,
    server: Server,
    prompts: list[list[int]],
    off: dict[str, list[Completion]],
    steps: list[list[int]],
) -> None:
    """Fails where the check of `test_three_requests_in_a_graph_of_four` passes although the bug is there."""
    bug.write_text(name)
    try:
        assert finding(server, prompts, off, steps).startswith(found)
    finally:
        bug.write_text("")

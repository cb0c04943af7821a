"""Some rows of all blocks through SGLang's own graph runner, with tapes in the place of CUDA graphs: the target's
graphs are of fixed numbers of rows, and any number of requests shares them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import ADMIT_ALL, PLAIN, SPECULATE, TINY_POOL
from plugins import graph_tape
from tape_checks import KEPT, SHORT, Check, ask, check_finding
from test_graph_tape import GRAPHS, QUICK_START, TAPES, first

from equality import assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_OVERLAPPING, Completion, Server

pytestmark = pytest.mark.server
BLOCK = 8
# Of SGLang issue 34384: verification of its own took the graph of 192 rows for one of 192 requests.
CROWD, WIDTH = 32, 6
GEOMETRY = [
    *["--speculative-num-draft-tokens", str(WIDTH), "--cuda-graph-bs-decode", "1", "32", "192"],
    *["--cuda-graph-backend-prefill", "disabled", "--context-length", "256", "--max-total-tokens", "9000"],
    *["--max-running-requests", "192", "--log-level", "info"],
]


@pytest.fixture(scope="module")
def server(bug: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = TINY_OVERLAPPING | ADMIT_ALL | TAPES
    environment |= {"GRAPH_TAPE_BUG": str(bug), "SGLANG_DFLASH_WIDTH": "auto"}
    arguments = [*PLAIN, *SPECULATE, *TINY_POOL, *GRAPHS, *QUICK_START]
    with PreloadedServer(arguments, tmp_path_factory.mktemp("packed") / "server.log", environment) as running:
        yield running


def replays(server: Server, log_start: int) -> Counter[tuple[int, int]]:
    """The target's replays since `log_start` by rows of the graph and number of requests, from the host's own log."""
    with server.log.open() as log:
        log.seek(log_start)
        found = re.findall(r"worker=target key_size=(\d+) \(num_tokens\) mode=TARGET_VERIFY raw_bs=(\d+)", log.read())
    return Counter((int(size), int(requests)) for size, requests in found)


def test_requests_get_what_they_get_alone(
    server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where packed rows commit other tokens than each request alone, or where a size of graph is not replayed."""
    log_start = server.log.stat().st_size

    def sizes() -> set[int]:
        return {size for size, requests in replays(server, log_start) if requests == 3}

    answers = ask(server, prompts, 3, lambda: sizes() == {8, 16, 32}, max_new_tokens=SHORT)
    assert_equal_tokens(answers, [first(one, SHORT) for one in off["plain"][:3]], prompts[:3])
    assert sizes() == {8, 16, 32}, replays(server, log_start)
    seen: Counter[int] = Counter()
    for answer in answers:
        histogram = answer.meta["spec_cap_lens_histogram"]
        assert sum(histogram) == answer.steps
        seen.update({rows: count for rows, count in enumerate(histogram) if count})
    assert seen[1] and seen[BLOCK] and set(seen) - {1, BLOCK}, seen
    print(f"rows: {dict(seen)}, {tau(answers):.2f} tokens per step")
    assert tau(answers) > 1.5


@KEPT
def test_what_every_way_to_verify_keeps(
    check: Check, server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where slots behind a request's rows are used wrongly once they are given to another request, where a row's
    grammar mask or penalties are not those of its chain, or where logprobs are those of other rows."""
    check(server, prompts, off)


@pytest.mark.parametrize("name", [graph_tape.OTHER_LENS, graph_tape.NEIGHBOURS])
def test_a_planted_bug_is_found(
    name: str, bug: Path, server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where the first test passes although the bug is there."""
    check_finding(name, bug, server, prompts, off)


@pytest.mark.matrix  # three minutes of captures
def test_a_graph_of_as_many_rows_as_requests(
    bug: Path, prompts: list[list[int]], off: dict[str, list[Completion]], tmp_path: Path
) -> None:
    """Fails where a graph's rows are shared out among other requests than those that run, as in SGLang issue 34384."""
    environment = TINY_OVERLAPPING | TAPES | {"GRAPH_TAPE_BUG": str(bug), "SGLANG_DFLASH_WIDTH": "auto"}
    asked = [number % len(prompts) for number in range(CROWD)]
    with PreloadedServer([*PLAIN, *SPECULATE, *GEOMETRY, *QUICK_START], tmp_path / "log", environment) as server:
        log_start = server.log.stat().st_size

        def met() -> bool:
            return any(size == 192 and count == CROWD for size, count in replays(server, log_start))

        answers = ask(server, [prompts[one] for one in asked], CROWD, met, max_new_tokens=SHORT)
        assert met(), replays(server, log_start)
    assert_equal_tokens(answers, [first(off["plain"][one], SHORT) for one in asked], [str(one) for one in asked])
    assert tau(answers) > 1.2

"""Trees of N rows through SGLang's own graph runner, with tapes in the place of CUDA graphs: the draft's graph fills
blocks of 8 rows and grows the trees, the target's verifies N rows of each request under a mask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import ADMIT_ALL, FULL, PLAIN, REGEX, SPECULATE, TINY_POOL
from plugins import graph_tape
from tape_checks import SHORT, ask, check_finding, check_logprobs, check_retraction
from test_graph_tape import GRAPHS, QUICK_START, TAPES, first, replays

from equality import assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_OVERLAPPING, Completion, Server

pytestmark = pytest.mark.server
# More rows than a block's 8; and fewer, with --matrix.
ROWS = [pytest.param(12, id="12 rows"), pytest.param(4, id="4 rows", marks=pytest.mark.matrix)]


@pytest.fixture(scope="module", params=ROWS)
def rows(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def server(rows: int, bug: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = TINY_OVERLAPPING | ADMIT_ALL | FULL | TAPES
    environment |= {"GRAPH_TAPE_BUG": str(bug), "SGLANG_DFLASH_TREE": str(rows)}
    arguments = [*PLAIN, *SPECULATE, *TINY_POOL, *GRAPHS, *QUICK_START]
    with PreloadedServer(arguments, tmp_path_factory.mktemp("trees") / "server.log", environment) as running:
        yield running


def test_requests_get_what_they_get_alone(
    server: Server, rows: int, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where a padded batch of trees commits other tokens than each request alone, where the target does not
    verify as many rows as asked, or where either model does not replay its graph."""
    log_start = server.log.stat().st_size
    answers = ask(server, prompts, 3, lambda: replays(server, log_start)["target", 4, 3] > 3, max_new_tokens=SHORT)
    assert_equal_tokens(answers, [first(one, SHORT) for one in off["plain"][:3]], prompts[:3])
    counts = replays(server, log_start)
    assert counts["target", 4, 3] > 3 and counts["draft", 4, 3] > 3, counts
    for answer in answers:
        histogram = answer.meta["spec_cap_lens_histogram"]
        assert sum(histogram) == histogram[rows] == answer.steps
    print(f"{rows} rows: {tau(answers):.2f} tokens per step")
    assert tau(answers) > 1.5


def test_retraction_and_the_end_of_the_context(
    server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where slots behind a tree's path are used wrongly once they are given to another request."""
    check_retraction(server, prompts, off)


def test_grammars(server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]) -> None:
    """Fails where a row's grammar mask is not that of its path, or the tree that the host walks is another one."""
    assert_equal_tokens(ask(server, prompts, 3, **REGEX), off["regex"], prompts[:3])


def test_logprobs(server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]) -> None:
    """Fails where logprobs do not follow the accepted path."""
    check_logprobs(server, prompts, off)


def test_penalties_are_refused(server: Server, rows: int, prompts: list[list[int]]) -> None:
    body = {"input_ids": prompts[0], "sampling_params": {"frequency_penalty": 0.5}}
    response = server.client().post("/generate", body)
    assert response.status_code == 400 and f"SGLANG_DFLASH_TREE={rows}" in response.text


@pytest.mark.parametrize("name", [graph_tape.CHAIN_MASK, graph_tape.UNMOVED_KV, graph_tape.ROW_POSITIONS])
def test_a_planted_bug_is_found(
    name: str, rows: int, bug: Path, server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where the first test passes although the bug is there."""
    if rows < 8:
        pytest.skip("smaller trees have too few siblings")
    check_finding(name, bug, server, prompts, off)

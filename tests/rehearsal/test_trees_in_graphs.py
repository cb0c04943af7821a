"""Trees through SGLang's own graph runner, with tapes in the place of CUDA graphs: up to 4 requests replay graphs of
trees, more requests those of whole blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import ADMIT_ALL, PLAIN, SPECULATE, TINY_POOL
from plugins import graph_tape
from tape_checks import KEPT, SHORT, Check, ask, check_finding
from test_graph_tape import GRAPHS, QUICK_START, TAPES, first, replays

from equality import assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_OVERLAPPING, Completion, Server

pytestmark = pytest.mark.server
ROWS = 12


@pytest.fixture(scope="module")
def server(bug: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = TINY_OVERLAPPING | ADMIT_ALL | TAPES
    environment |= {"GRAPH_TAPE_BUG": str(bug), "SGLANG_DFLASH_TREE": str(ROWS)}
    arguments = [*PLAIN, *SPECULATE, *TINY_POOL, *GRAPHS, *QUICK_START]
    with PreloadedServer(arguments, tmp_path_factory.mktemp("trees") / "server.log", environment) as running:
        yield running


@pytest.mark.parametrize("count", [1, 3])
def test_requests_get_what_they_get_alone(
    count: int, server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where trees commit other tokens than each request alone, or are not replayed."""
    log_start = server.log.stat().st_size
    answers = ask(server, prompts, count, max_new_tokens=SHORT)
    assert_equal_tokens(answers, [first(one, SHORT) for one in off["plain"][:count]], prompts[:count])
    assert any(name == "target" for name, *_ in replays(server, log_start))
    for answer in answers:
        histogram = answer.meta["spec_cap_lens_histogram"]
        assert histogram[ROWS] == sum(histogram), histogram
    assert tau(answers) > 1.5


@KEPT
def test_what_every_way_to_verify_keeps(
    check: Check, server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where slots behind a tree are used wrongly once they are given to another request, as trees and whole
    blocks follow each other; or where a batch with a grammar, penalties or logprobs gets trees."""
    check(server, prompts, off)


@pytest.mark.parametrize("name", [graph_tape.UNMOVED, graph_tape.CHAIN_MASK])
def test_a_planted_bug_is_found(
    name: str, bug: Path, server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where the first test passes although the bug is there."""
    check_finding(name, bug, server, prompts, off)

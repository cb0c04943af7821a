"""Steps of every width through SGLang's own graph runner, with tapes in the place of CUDA graphs: each width has graphs
and attention of its own."""

from __future__ import annotations

from collections import Counter
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


@pytest.fixture(scope="module")
def server(bug: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = TINY_OVERLAPPING | ADMIT_ALL | TAPES
    environment |= {"GRAPH_TAPE_BUG": str(bug), "SGLANG_DFLASH_WIDTH": "auto", graph_tape.WIDTHS: "1"}
    arguments = [*PLAIN, *SPECULATE, *TINY_POOL, *GRAPHS, *QUICK_START]
    with PreloadedServer(arguments, tmp_path_factory.mktemp("widths") / "server.log", environment) as running:
        yield running


def test_requests_get_what_they_get_alone(
    server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where a width commits other tokens than each request alone, or where a width is not replayed."""
    assert "graphs of other widths than 8 took" in server.log.read_text()
    log_start = server.log.stat().st_size
    answers = ask(server, prompts, 3, max_new_tokens=SHORT)
    counts = replays(server, log_start)
    assert counts["target", 4, 3] > counts["draft", 4, 3] > 5, counts  # plain steps replay no draft
    assert_equal_tokens(answers, [first(one, SHORT) for one in off["plain"][:3]], prompts[:3])
    seen: Counter[int] = Counter()
    for answer in answers:
        seen.update({rows: count for rows, count in enumerate(answer.meta["spec_cap_lens_histogram"]) if count})
    assert set(seen) == {1, 2, 4, 8}, seen
    print(f"widths: {dict(seen)}, {tau(answers):.2f} tokens per step")
    assert tau(answers) > 1.5


@KEPT
def test_what_every_way_to_verify_keeps(
    check: Check, server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where slots behind a block are used wrongly once they are given to another request, where a mask or
    penalties are laid out for another width, or where logprobs are those of other rows."""
    check(server, prompts, off)


def test_a_planted_bug_is_found(
    bug: Path, server: Server, prompts: list[list[int]], off: dict[str, list[Completion]]
) -> None:
    """Fails where the first test passes although the bug is there."""
    check_finding(graph_tape.OTHER_WIDTH, bug, server, prompts, off)

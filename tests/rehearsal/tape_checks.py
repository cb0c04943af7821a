"""What every way to verify must keep when SGLang's graph runner runs it over tapes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from arms import PENALTIES, REGEX, to_the_limit
from test_graph_tape import TRIES, first

from equality import ask_off, assert_equal_tokens
from sglang_dflash.serving import Completion, Server

SHORT = 48
Answers = dict[str, list[Completion]]  # of speculation off: plain, under a grammar, with penalties


def ask(
    server: Server,
    prompts: list[list[int]],
    count: int,
    together: Callable[[], bool] = lambda: True,
    **sampling: object,
) -> list[Completion]:
    """together: whether the requests ran at once. On a busy machine the first may end before the last has come. Then
    all run again."""
    client = server.client(timeout_s=120.0)
    for _ in range(TRIES):
        client.flush_when_idle()
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(lambda prompt: client.generate(prompt, **sampling), prompts[:count]))
        if together():
            break
    return answers


def check_retraction(server: Server, prompts: list[list[int]], off: Answers) -> None:
    """All answers go on to the end of the context; the pool is too small for them."""
    client = server.client(timeout_s=240.0)
    client.flush_when_idle()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: client.generate(prompt, **to_the_limit(prompt)), prompts))
    assert_equal_tokens(answers, off["plain"], prompts)
    assert sum(answer.meta["num_retractions"] for answer in answers) > 0, "nothing was retracted"


def check_grammars(server: Server, prompts: list[list[int]], off: Answers) -> None:
    """A row's grammar mask is that of the drafts before it."""
    assert_equal_tokens(ask(server, prompts, 3, **REGEX), off["regex"], prompts[:3])


def check_penalties(server: Server, prompts: list[list[int]], off: Answers) -> None:
    """A row's penalties are those of the drafts before it."""
    limit = PENALTIES["min_new_tokens"]
    answers = ask(server, prompts, 3, **PENALTIES, max_new_tokens=limit)
    assert_equal_tokens(answers, [one.cut(limit) for one in off["penalties"]], prompts[:3])


def check_logprobs(server: Server, prompts: list[list[int]], off: Answers) -> None:
    """Logprobs are those of the rows that are committed."""
    answer, expected = ask_off(server.client(), prompts[1], max_new_tokens=SHORT), first(off["plain"][1], SHORT)
    assert answer.ids == expected.ids
    assert answer.gaps == pytest.approx(expected.gaps, abs=1e-3)


Check = Callable[[Server, list[list[int]], Answers], None]
KEPT = pytest.mark.parametrize(
    "check",
    [check_retraction, check_grammars, check_penalties, check_logprobs],
    ids=lambda check: check.__name__.removeprefix("check_"),
)


def check_finding(name: str, bug: Path, server: Server, prompts: list[list[int]], off: Answers) -> None:
    """With the planted bug, answers are not those of speculation off. bug: the file that names it to the server."""
    bug.write_text(name)
    try:
        answers = ask(server, prompts, 3, max_new_tokens=SHORT)
        assert [answer.ids for answer in answers] != [first(one, SHORT).ids for one in off["plain"][:3]]
    except httpx.HTTPError:
        pytest.fail("the server ended")
    finally:
        bug.write_text("")

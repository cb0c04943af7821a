"""Drafts in other trainers' layouts are served in the steps of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import FULL, MAX_NEW_TOKENS, PLAIN, POOL, Baseline, widths_of
from fine_tuning import fine_tune
from reference_pair import ReferencePair
from test_features import assert_served
from test_lifecycle import assert_pool_empties

from equality import tau
from preloaded import PreloadedServer
from published_layouts import publish
from sglang_dflash.serving import TINY_DRAFT, TINY_OVERLAPPING, Client

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("published layouts")]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def served(draft: Path, folder: Path, environment: dict[str, str], *flags: str) -> PreloadedServer:
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    return PreloadedServer([*PLAIN, *POOL, *speculate, *flags], folder / "log", environment)


def assert_steps(client: Client, draft: Path, prompts: list[list[int]], rows: int) -> float:
    """Fails where a step differs from the reference's. Returns the server's tau."""
    answers = [client.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
    for answer, expected in zip(answers, ReferencePair(draft=draft).generate(prompts, MAX_NEW_TOKENS), strict=True):
        counts = [expected.commit_lens.count(length) for length in range(1, rows + 1)]
        padded = [*answer.accept_histogram, *[0] * (rows - len(answer.accept_histogram))]
        assert (answer.ids, answer.steps, padded) == (expected.ids, len(expected.commit_lens), counts)
    return tau(answers)


def test_a_head_over_fewer_ids(baseline: Baseline, tmp_path: Path) -> None:
    """Fails where a nested config, taps, head or ids are misread: the steps would not be those of the plain draft."""
    draft, prompts = publish("speculators", tmp_path / "draft"), baseline.prompts[::4]
    with served(draft, tmp_path, TINY_OVERLAPPING | FULL) as server:
        client = server.client()
        assert assert_steps(client, draft, prompts, 8) == assert_steps(client, TINY_DRAFT, prompts, 8) > 2.5
        client.flush_when_idle()
        assert_served(client, baseline, 2.5)
        log = server.log.read_text()
    assert "The draft chooses among 1783 ids by a head of its own" in log
    assert "speculators" in log


@pytest.fixture(scope="module")
def anchor_first(baseline: Baseline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft, taught in DeepSpec's layout to draft from the anchor's row what the target answered."""
    folder = publish("DeepSpec", tmp_path_factory.mktemp("deepspec") / "draft")
    answers = [answer.ids for answer in baseline.answers]
    fine_tune(folder, list(zip(baseline.prompts, answers, strict=True)), steps=120, learning_rate=2e-3)
    return folder


def test_an_anchor_that_drafts(anchor_first: Path, baseline: Baseline, tmp_path: Path) -> None:
    """Fails where 8 rows give 7 drafts, or a row's draft is taken for another position's."""
    with served(anchor_first, tmp_path, TINY_OVERLAPPING | FULL) as server:
        client = server.client()
        assert assert_steps(client, anchor_first, baseline.prompts[::4], 9) > 2.5
        client.flush_when_idle()
        assert_served(client, baseline, 2.0)
        assert_pool_empties(client)


def test_an_anchor_that_drafts_where_it_pays(anchor_first: Path, baseline: Baseline, tmp_path: Path) -> None:
    """Fails where blocks of fewer rows, or of some of the requests, get drafts of other positions."""
    environment = TINY_OVERLAPPING | {"SGLANG_DFLASH_WIDTH": "auto"}
    with served(anchor_first, tmp_path, environment) as server:
        client = server.client()
        assert_served(client, baseline, 1.2)
        widths = widths_of(client, *baseline.prompts[:10])
        assert len(widths) == 10 and widths[9] > 0, widths

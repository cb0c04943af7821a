"""DFlash2 and Domino drafts are served as any other: right tokens, and the steps of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from arms import EVERY_WIDTH, FULL, MAX_NEW_TOKENS, PAGES_AND_CHUNKS, PLAIN, POOL, SPECULATE, Baseline, widths_of
from changed_models import dflash2_draft, domino_draft, with_other_weights
from reference_pair import ReferencePair
from test_features import assert_draft_changes, assert_like, assert_served, shared_tensors
from test_lifecycle import assert_pool_empties

from equality import BLOCK_SIZE
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_DRAFT, TINY_ENVIRONMENT, TINY_OVERLAPPING, Client, Server

pytestmark = pytest.mark.server
RANKS = ["--tp-size", "2"]
# The draft, flags and environment of each arm.
ARMS: dict[str, tuple[Callable[[Path], Path], list[str], dict[str, str]]] = {
    "dflash2": (dflash2_draft, ["--log-level", "debug"], TINY_OVERLAPPING | FULL),
    "dflash2 at every width": (dflash2_draft, PAGES_AND_CHUNKS, TINY_ENVIRONMENT | EVERY_WIDTH),
    "dflash2 on ranks": (dflash2_draft, RANKS, TINY_OVERLAPPING | FULL),
    "few ids on ranks": (dflash2_draft, RANKS, TINY_OVERLAPPING | EVERY_WIDTH | {"SGLANG_DFLASH_DRAFT_VOCAB": "256"}),
    "domino": (domino_draft, PAGES_AND_CHUNKS, TINY_OVERLAPPING | FULL),
    "domino on ranks": (domino_draft, RANKS, TINY_OVERLAPPING | FULL),
}
HEADS = ("conv", "codebook", "hidden_projection", "gru", "embed_proj")
__all__ = ["shared_tensors"]  # a fixture


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, baseline: Baseline, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    make, flags, environment = ARMS[request.param]
    folder = tmp_path_factory.mktemp("head")
    drafts = [*SPECULATE, "--speculative-draft-model-path", str(make(folder / "draft"))]
    with PreloadedServer([*PLAIN, *POOL, *flags, *drafts], folder / "server.log", environment) as running:
        yield running


@pytest.fixture
def draft(server: Server) -> Path:
    return Path(server.arguments[-1])


def on_arms(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", names, indirect=True, scope="module")


@on_arms("dflash2", "domino")
def test_the_steps_of_the_reference(client: Client, baseline: Baseline, draft: Path) -> None:
    """Fails where convolutions, candidates, scores, a walk or a rollout differ from the reference in any step; also
    where the head changes so few drafts that the test would not see it."""
    prompts = baseline.prompts[::4]
    assert_like(client, ReferencePair(draft=draft), prompts)
    with_head, plain = (ReferencePair(draft=one).generate(prompts[:6], MAX_NEW_TOKENS) for one in (draft, TINY_DRAFT))
    assert sum(one.commit_lens != other.commit_lens for one, other in zip(with_head, plain, strict=True)) >= 3
    client.flush_when_idle()
    assert_served(client, baseline, 2.5)
    assert_pool_empties(client)


@on_arms("dflash2", "domino")
def test_weights_of_heads_change(
    client: Client, baseline: Baseline, draft: Path, tmp_path: Path, shared_tensors: None
) -> None:
    """Fails where a head keeps old weights, or a DFlash2 draft's folder passes for a target's."""
    changed = with_other_weights(draft, tmp_path / "draft", HEADS)
    assert_draft_changes(client, draft, changed, baseline.prompts[::12])


@on_arms("dflash2 at every width")
def test_heads_at_every_width(client: Client, baseline: Baseline) -> None:
    """Fails where a step of fewer rows than the trained block changes an answer, or has useless drafts."""
    widths = widths_of(client, *baseline.prompts[:10])
    assert all(widths[1 : BLOCK_SIZE + 1]), widths
    assert_served(client, baseline, 1.7)
    assert_pool_empties(client)


@on_arms("dflash2 on ranks", "domino on ranks")
def test_heads_on_ranks(client: Client, baseline: Baseline, draft: Path) -> None:
    """Fails where ranks disagree about a draft, or choose it from their own share of the vocabulary alone."""
    assert_like(client, ReferencePair(draft=draft), baseline.prompts[::8])
    client.flush_when_idle()
    assert_served(client, baseline, 2.5)


@on_arms("few ids on ranks")
def test_a_short_head_on_ranks(client: Client, server: Server, baseline: Baseline) -> None:
    """Fails where ranks with their own shares of a short head disagree, a selector's candidates have wrong ids, the few
    ids do not follow what is served, or a rank plans for itself."""
    assert_served(client, baseline, 1.1)
    assert "The draft chooses among 128 of this rank's ids" in server.log.read_text()
    assert_pool_empties(client)

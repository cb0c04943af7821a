"""A DFlash2 draft, with convolutions and a selector, is served as any other: right tokens, the reference's steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import EVERY_WIDTH, FULL, MAX_NEW_TOKENS, PAGES_AND_CHUNKS, PLAIN, POOL, SPECULATE, Baseline, widths_of
from changed_models import dflash2_draft, with_other_weights
from reference_pair import ReferencePair
from test_features import assert_like, assert_served, shared_tensors, update_from_tensors
from test_lifecycle import assert_pool_empties

from equality import BLOCK_SIZE
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_DRAFT, TINY_ENVIRONMENT, TINY_OVERLAPPING, Client, Server

pytestmark = pytest.mark.server
ARMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "whole": (["--log-level", "debug"], TINY_OVERLAPPING | FULL),
    "widths": (PAGES_AND_CHUNKS, TINY_ENVIRONMENT | EVERY_WIDTH),
    "ranks": (["--tp-size", "2"], TINY_OVERLAPPING),
}
__all__ = ["shared_tensors"]  # a fixture


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dflash2_draft(tmp_path_factory.mktemp("dflash2") / "draft")


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, baseline: Baseline, draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags, environment = ARMS[request.param]
    drafts = [*SPECULATE, "--speculative-draft-model-path", str(draft)]
    log = tmp_path_factory.mktemp(request.param) / "server.log"
    with PreloadedServer([*PLAIN, *POOL, *drafts, *flags], log, environment) as running:
        yield running


def on_arm(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", [name], indirect=True)


@on_arm("whole")
def test_the_steps_of_the_reference(client: Client, baseline: Baseline, draft: Path) -> None:
    """Fails where convolutions, candidates, their scores or the walk differ from the reference in any step; also where
    the head changes so few drafts that the test would not see it."""
    prompts = baseline.prompts[::4]
    assert_like(client, ReferencePair(draft=draft), prompts)
    with_head, plain = (ReferencePair(draft=one).generate(prompts[:6], MAX_NEW_TOKENS) for one in (draft, TINY_DRAFT))
    assert sum(one.commit_lens != other.commit_lens for one, other in zip(with_head, plain, strict=True)) >= 3
    client.flush_cache()
    assert_served(client, baseline, 2.5)
    assert_pool_empties(client)


@on_arm("whole")
def test_dflash2_weights_change(
    client: Client, baseline: Baseline, draft: Path, tmp_path: Path, shared_tensors: None
) -> None:
    """Fails where the selector or a convolution keeps old weights, or a DFlash2 folder passes for a target's."""
    changed = with_other_weights(draft, tmp_path / "draft", ("conv", "codebook", "hidden_projection"))
    refusal = client.post("/update_weights_from_disk", {"model_path": str(changed)})
    assert refusal.status_code == 400 and "selector 'draft'" in refusal.json()["message"]
    update_from_tensors(client, changed, selector="draft")
    assert_like(client, ReferencePair(draft=changed), baseline.prompts[::12])
    update_from_tensors(client, draft, selector="draft")
    assert_like(client, ReferencePair(draft=draft), baseline.prompts[:1])


@on_arm("widths")
def test_every_width_of_dflash2(client: Client, baseline: Baseline) -> None:
    """Fails where a step of fewer rows than the trained block changes an answer, or has useless drafts."""
    widths = widths_of(client, baseline.prompts[0])
    assert all(widths[1 : BLOCK_SIZE + 1]), widths
    assert_served(client, baseline, 1.7)
    assert_pool_empties(client)


@on_arm("ranks")
def test_dflash2_on_ranks(client: Client, baseline: Baseline, draft: Path) -> None:
    """Fails where ranks disagree about candidates, or take those of their own share of the vocabulary alone."""
    assert_like(client, ReferencePair(draft=draft), baseline.prompts[::8])
    client.flush_cache()
    assert_served(client, baseline, 2.5)

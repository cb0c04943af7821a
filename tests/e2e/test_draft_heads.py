"""DFlash2 and Domino drafts are served as any other: right tokens, and the steps of the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from arms import MAX_NEW_TOKENS, Baseline, on_arms, widths_of
from changed_models import with_other_weights
from reference_pair import ReferencePair
from test_features import assert_draft_changes, assert_like, assert_ranks_agree, assert_served, shared_tensors
from test_lifecycle import assert_pool_empties

from equality import BLOCK_SIZE
from sglang_dflash.serving import TINY_DRAFT, Client, Server

pytestmark = pytest.mark.server
HEADS = ("conv", "codebook", "hidden_projection", "gru", "embed_proj")
__all__ = ["shared_tensors"]  # a fixture


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


@pytest.mark.matrix
@on_arms("dflash2 at every width")
def test_heads_at_every_width(client: Client, baseline: Baseline) -> None:
    """Fails where a step of fewer rows than the trained block changes an answer, or has useless drafts."""
    widths = widths_of(client, *baseline.prompts[:10])
    assert all(widths[1 : BLOCK_SIZE + 1]), widths
    assert_served(client, baseline, 1.7)
    assert_pool_empties(client)


@pytest.mark.matrix
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
    assert_ranks_agree(client, baseline, 1.1)
    assert "The draft chooses among 128 of this rank's ids" in server.log.read_text()

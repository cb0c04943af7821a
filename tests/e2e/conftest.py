"""Servers for the end-to-end tests: one arm runs at a time in a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from arms import ARMS, PLAIN, POOL, SPECULATE, STORE, Baseline
from baseline import baseline, tokenizer
from reference_pair import ReferencePair

from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_DRAFT, Client, Server

__all__ = ["baseline", "tokenizer"]  # fixtures


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, baseline: Baseline, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The arm that `on_arms` names. Flags given twice count as given last; the draft's folder is the last argument."""
    arm, folder = ARMS[request.param], tmp_path_factory.mktemp("arm")
    draft = TINY_DRAFT if arm.draft is None else arm.draft(folder / "draft")
    flags = [*PLAIN, *POOL, *arm.flags, *SPECULATE[:2], "--speculative-draft-model-path", str(draft)]
    environment = {STORE: str(folder / "store"), **arm.environment}
    with PreloadedServer(flags, folder / "server.log", environment) as running:
        yield running


@pytest.fixture
def draft(server: Server) -> Path:
    """The draft's folder."""
    return Path(server.arguments[-1])


@pytest.fixture(scope="session")
def oracle() -> ReferencePair:
    return ReferencePair()


@pytest.fixture
def client(server: Server) -> Client:
    """The arm's client, with an empty radix cache."""
    client = server.client()
    client.flush_when_idle()
    return client

"""One server over two nodes: two launchers on this machine, a rank each, over gloo."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import httpx
import pytest
from arms import MAX_NEW_TOKENS, PLAIN, POOL, SPECULATE, Baseline

from equality import assert_equal_tokens, tau
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_ENVIRONMENT, Server
from sglang_dflash.serving.server import stop_all

pytestmark = pytest.mark.server
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "SGLANG_HOST_IP": "127.0.0.1"}


def nodes(folder: Path, *own: dict[str, str]) -> list[Server]:
    """A launcher for each environment, not started yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    layout = ["--tp-size", str(len(own)), "--nnodes", str(len(own)), "--dist-init-addr", f"127.0.0.1:{first}"]
    return [
        PreloadedServer(
            [*PLAIN, *POOL, *SPECULATE, *layout, "--node-rank", str(rank)],
            folder / f"node-{rank}.log",
            TINY_ENVIRONMENT | LOOPBACK | variables,
        )
        for rank, variables in enumerate(own)
    ]


def test_two_nodes(baseline: Baseline, tmp_path: Path) -> None:
    """Fails where the nodes' ranks disagree, tokens differ from those of one rank, or a node outlives the first."""
    first, second = launched = nodes(tmp_path, {}, {})
    try:
        for node in launched:
            node.launch()
        client = first.wait(timeout_s=300).client()
        answers = client.generate_all(baseline.prompts, 8, max_new_tokens=MAX_NEW_TOKENS)
        assert_equal_tokens(answers, baseline.answers, baseline.prompts)
        assert tau(answers) > 1.5
        assert httpx.get(f"{second.url}/health", timeout=10).status_code == 200
        assert httpx.get(f"{second.url}/v1/models", timeout=10).status_code != 200, "only the first node answers"
    finally:
        stop_all(launched)


def test_nodes_must_be_alike(tmp_path: Path) -> None:
    """Fails where two nodes with unequal variables go on and wait for each other, or one does not say why."""
    launched = nodes(tmp_path, {"SGLANG_DFLASH_WIDTH": "full"}, {"SGLANG_DFLASH_WIDTH": "4"})
    said = "the ranks differ in SGLANG_DFLASH_WIDTH: rank 0 has full, rank 1 has 4; all nodes need the same"
    try:
        for node in launched:
            node.launch()
        deadline = time.monotonic() + 120
        for node in launched:
            assert node.ended(within_s=deadline - time.monotonic()), f"{node.log} goes on"
            assert said in node.log.read_text()
    finally:
        stop_all(launched)

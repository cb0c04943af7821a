"""The example agent finishes its tasks on the embedded pair, with tool calls that the host parses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from arms import on_arms

from sglang_dflash.serving import Client, Server

pytestmark = pytest.mark.server

AGENT = Path(__file__).parents[2] / "examples" / "agent.py"


def run_agent(server: Server, folder: Path, *task: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(AGENT), *task, "--url", f"{server.url}/v1", "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@on_arms("default")
def test_it_computes_and_saves(server: Server, client: Client, tmp_path: Path) -> None:
    """Fails where a call is not parsed, a result does not reach the model, or the task is not finished."""
    done = run_agent(server, tmp_path)
    assert done.returncode == 0, done.stderr
    calls = [line.split()[0] for line in done.stdout.splitlines() if " -> " in line]
    assert calls == ["calculate", "write_file"], done.stdout
    assert (tmp_path / "result.txt").read_text() == "114"
    assert "12 * 7 + 30 = 114" in done.stdout.splitlines()[-1]


@on_arms("default")
def test_it_reads_what_is_there(server: Server, client: Client, tmp_path: Path) -> None:
    """Fails where the agent makes an answer up, or a missing file ends it."""
    (tmp_path / "prices.txt").write_text("items: 47")
    done = run_agent(server, tmp_path, "What is in prices.txt?")
    assert done.returncode == 0, done.stderr
    assert 'read_file {"path": "prices.txt"} -> items: 47' in done.stdout and "47" in done.stdout.splitlines()[-1]
    missing = run_agent(server, tmp_path, "What is in scores.txt?")
    assert "-> error: " in missing.stdout and "Traceback" not in missing.stderr, missing.stderr

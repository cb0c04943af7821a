"""SGLang's client, as we run it, against a server whose answers and delays are known."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.serving import TINY_TARGET, Server, ServerError, timing
from sglang_dflash.serving.endpoint import Endpoint, Sampling
from sglang_dflash.serving.sessions import Session
from sglang_dflash.serving.timing import Timer, Traffic
from sglang_dflash.serving.traffic import play, prompted

FAKE_SERVER = Path(__file__).parents[1] / "bench" / "fake_server.py"
CLOSED = Traffic(2.0, False, 0, False, 60.0)


def render(messages: list[dict[str, str]], template: dict[str, object]) -> list[int]:
    return [ord(letter) for letter in messages[0]["content"]]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sglang", "other"])
def test_the_clients_times_and_tokens(tmp_path: Path, engine: str) -> None:
    """Fails where SGLang's client has other flags, rows or results than we know, sends other prompts, reads other
    tokens, or times other delays than the server's: 80 ms to the first token, 30 ms between tokens."""
    flags = ["--first-ms", "80", "--step-ms", "30"]
    launch = (sys.executable, str(FAKE_SERVER))
    with Server(flags, tmp_path / "server.log", launch=launch, health="/health").start(20.0) as server:
        endpoint = Endpoint(server.url, engine, 20.0)
        sessions = [Session.of_texts(f"s{i}", [f"question {i}"]) for i in range(4)]
        asked = prompted(sessions, play(endpoint, render, sessions, 4, Sampling(6)), render)
        timer, told = Timer(endpoint, str(TINY_TARGET), lambda text: len(text.split()), tmp_path / "client.log"), []
        records, wall_s = timer.time(asked, Sampling(6), CLOSED, lambda: told.append(1))
        served = server.client().get("/server_info")["asked"]
    assert [record.id for record in records] == [f"s{i}/0" for i in range(4)] and not any(r.failure for r in records)
    assert [(record.tokens, record.prompt_tokens) for record in records] == [(6, 10)] * 4
    assert all(0.08 <= record.ttft_s < 0.2 and 0.03 <= record.tpot_s < 0.05 for record in records)
    assert 2 * 0.23 <= wall_s < 1.5  # two at a time, two rounds of 80 + 5 * 30 ms
    assert (served, len(told)) == (8, 4)


def test_a_client_that_is_silent_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails where a client without an answer is waited for, or lives on."""
    pid = tmp_path / "pid"
    script = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    begin = time.monotonic()
    with pytest.raises(ServerError, match=r"no answer came for 1 s \(--stall-s\)"):
        timing._run([sys.executable, "-c", script], {}, 1.0, tmp_path / "log", lambda: None)
    assert time.monotonic() - begin < 10 and not Path("/proc", pid.read_text()).exists()


def test_progress_is_read_from_the_bar(tmp_path: Path) -> None:
    """Fails where an answer is missed or told twice, or the client's output is not in the log."""
    said = r"print(f'\r{n}0%|# | {n}/3 [00:00<00:01, 1.0s/it]', end='', file=sys.stderr, flush=True)"
    script, told = f"import sys\nprint('begin', flush=True)\nfor n in range(4): {said}", list[int]()
    log = tmp_path / "log"
    assert timing._run([sys.executable, "-c", script], {}, 30.0, log, lambda: told.append(1)) == 0
    assert len(told) == 3 and "3/3" in log.read_text() and "begin" in log.read_text()


@pytest.mark.parametrize("key", ["", "ours"])
def test_a_key_reaches_its_own_server_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    """Fails where the client sends a key of the shell to a server that has another one, or none."""
    monkeypatch.setenv("OPENAI_API_KEY", "of the shell")
    monkeypatch.setenv("API_KEY", "of the shell")
    endpoint: Any = SimpleNamespace(key=key)
    environment = Timer(endpoint, "", len, tmp_path)._environment()
    assert (environment.get("OPENAI_API_KEY", ""), "API_KEY" in environment) == (key, False)

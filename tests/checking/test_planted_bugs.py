"""`sglang-dflash check` against servers: the embedded pair passes, and every planted bug is found for what it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import planted_bugs
import psutil
import pytest
from transformers import AutoTokenizer

from preloaded import PreloadedServer
from sglang_dflash.cli.main import run
from sglang_dflash.serving import (
    PAIRS,
    TINY_DRAFT,
    TINY_ENVIRONMENT,
    TINY_OVERLAPPING,
    TINY_TARGET,
    Server,
    arms,
    held_out_prompts,
)
from sglang_dflash.serving.arms import WHOLE_BLOCKS

pytestmark = pytest.mark.server
COMMAND = [sys.executable, "-m", "sglang_dflash.cli", "check"]
TINY_FLAGS = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "16"]
EVERY_WIDTH = Path(__file__).parents[1] / "e2e" / "plugins"
CASES = ["plain", "stop", "logprobs", "penalties"]
PROMPTS = 8
SNAPSHOT_EVERY = 64  # tokens after which the prefix cache keeps a recurrent state
SMALL = ["--num-prompts", str(PROMPTS), "--max-new-tokens", "48", "--cases", ",".join(CASES)]


@dataclass(frozen=True, slots=True)
class Checked:
    """One run of the command; `report` is its last line on standard output."""

    code: int
    report: dict[str, Any]
    shown: str
    said: str


def check_here(*words: object) -> Checked:
    """The command in this process: its servers are preloaded ones, and nothing is imported anew."""
    shown, said = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown), redirect_stderr(said):
        patch.setattr(arms, "Server", PreloadedServer)
        patch.setattr(sys, "argv", ["sglang-dflash", "check", *map(str, words)])
        for name, value in TINY_OVERLAPPING.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            run()
    lines = shown.getvalue().splitlines()
    report = json.loads(lines[-1]) if lines else {}
    return Checked(ended.value.code or 0, report, "\n".join(lines[:-1]), said.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check")


@pytest.fixture(scope="module")
def clean(folder: Path) -> Checked:
    """The embedded pair as it is, both arms started by the command itself."""
    words = [*SMALL, "--save-off", folder / "off.json", "--json", folder / "whole.json", "--logs", folder]
    return check_here(*words, "--reference", "--control")


def _planted_server(
    target: Path, draft: Path, folder: Path, flags: list[str], *plugins: Path, **environment: str
) -> PreloadedServer:
    """A DFLASH server with the bugs in it; none is active."""
    bug = folder / "bug"
    bug.write_text("")
    folders = [Path(planted_bugs.__file__).parent, *plugins, os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(map(str, folders))
    environment = {
        **TINY_OVERLAPPING,
        **WHOLE_BLOCKS,
        "PYTHONPATH": path.rstrip(os.pathsep),
        planted_bugs.VARIABLE: str(bug),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
        **environment,
    }
    speculate = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]
    return PreloadedServer(
        ["--model-path", str(target), *TINY_FLAGS, *speculate, *flags], folder / "planted.log", environment
    )


def _check_planted(server: Server, folder: Path, bug: str, *words: str) -> Checked:
    """Checks the server while a bug is active."""
    (folder / "bug").write_text(bug)
    checked = check_here("--base-url", server.url, "--flush", "--off-from", folder / "off.json", *words)
    (folder / "bug").write_text("")
    return checked


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with _planted_server(TINY_TARGET, TINY_DRAFT, folder, []) as running:
        yield running


@pytest.fixture
def planted(server: Server, clean: Checked, folder: Path) -> Callable[..., Checked]:
    return partial(_check_planted, server, folder)


def test_the_embedded_pair_is_lossless(clean: Checked, folder: Path) -> None:
    """Fails where the pair does not pass, a case is left out, or the report does not say what was asked."""
    assert clean.code == 0, clean.said
    report = clean.report
    assert report["lossless"] and not report["failures"]
    asked = {(case["case"], case["concurrency"]) for case in report["cases"]}
    assert asked == {(n, c) for n in CASES for c in (1, 8)} | {("plain, whole blocks", 1)}
    assert all(case["identical"] == PROMPTS for case in report["cases"]), report["cases"]
    assert all(case["changed"] for case in report["cases"] if case["case"] in ("stop", "penalties"))
    plain = report["cases"][-1]["acceptance"]
    assert plain["tau"] > 2.5 and len(plain["by_position"]) == 7
    assert report["draft_kv"]["lost"] == [] and report["draft_kv"]["prompts"] >= 5
    assert report["reference"]["lost"] == [] and report["reference"]["prompts"] == PROMPTS
    assert report["contamination"]["own"] > 8 and not report["contamination"]["foreign"]
    assert report["kv_slots"]["before"] == 0 and set(report["kv_slots"]["after"]) == {0}
    assert all(case["identical"] == PROMPTS for case in report["control"])
    assert not report["servers"]["off"]["overlap"] and report["servers"]["on"]["overlap"]
    assert json.loads((folder / "whole.json").read_text()) == report
    assert "Lossless: 72 requests" in clean.shown and "Traceback" not in clean.said


def test_without_a_bug_the_planted_server_passes(planted: Callable[..., Checked]) -> None:
    """Fails where the tests below would find bugs that nobody planted."""
    checked = planted("", "--cases", "penalties")
    assert checked.code == 0, (checked.shown, checked.said)
    assert checked.report["notes"] == []


def test_one_draft_too_many(planted: Callable[..., Checked]) -> None:
    """Fails where a rejected draft that is committed now and then goes unseen."""
    checked = planted(planted_bugs.ACCEPT, "--cases", "plain")
    assert checked.code == 1
    found = checked.report["differences"]
    assert found and all(one["kind"] == "token" and not one["tie"] for one in found)
    assert all(one["gap"] > 1e-3 and one["off_text"] and one["on_text"] for one in found)
    assert "NOT LOSSLESS" in checked.shown and f"token {found[0]['index']} is " in checked.shown


def test_stale_penalties(planted: Callable[..., Checked]) -> None:
    """Fails where penalties that do not count accepted drafts pass, or plain requests are blamed."""
    checked = planted(planted_bugs.PENALTY, "--cases", "logprobs,penalties")
    assert checked.code == 1
    different = {case["case"] for case in checked.report["cases"] if case["different"]}
    assert different == {"penalties"}


def test_swapped_rows(planted: Callable[..., Checked]) -> None:
    """Fails where two requests that get each other's tokens go unseen, by the answers or by the markers."""
    checked = planted(planted_bugs.SWAP, "--cases", "plain")
    assert checked.code == 1
    different = {case["concurrency"]: case["different"] for case in checked.report["cases"]}
    assert different[1] == 0 and different[8] > 0
    heard = checked.report["contamination"]
    assert heard["foreign"] or heard["failed"], "answers held another's tokens, and no marker told"


def test_leaked_slots(planted: Callable[..., Checked]) -> None:
    """Fails where KV slots that do not come back are overlooked, although every answer is right."""
    checked = planted(planted_bugs.LEAK, "--cases", "plain")
    assert checked.code == 1
    assert all(not case["different"] for case in checked.report["cases"])
    assert sum(checked.report["kv_slots"]["after"]) >= 2
    assert any("KV slots stay in use" in reason for reason in checked.report["failures"])


@pytest.mark.parametrize("bug", [planted_bugs.SKIP_DECODE, planted_bugs.SKIP_PREFILL])
def test_lost_draft_kv(planted: Callable[..., Checked], bug: str) -> None:
    """Fails where a draft KV write that is left out is not reported, or is reported as a wrong answer."""
    checked = planted(bug, "--cases", "plain")
    assert checked.code == 0, checked.shown
    assert checked.report["draft_kv"]["lost"]
    assert "acceptance lost: " in checked.shown and "Lossless: " in checked.shown


@pytest.fixture(scope="module")
def ragged(clean: Checked, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Checked]]:
    """A server that verifies random rows."""
    own = tmp_path_factory.mktemp("ragged")
    (own / "off.json").write_text((folder / "off.json").read_text())
    with _planted_server(TINY_TARGET, TINY_DRAFT, own, [], EVERY_WIDTH, SGLANG_DFLASH_WIDTH="auto") as running:
        yield partial(_check_planted, running, own)


@pytest.mark.parametrize("bug", ["", *planted_bugs.RAGGED])
def test_ragged_rows(ragged: Callable[..., Checked], bug: str) -> None:
    """Fails where a bug of rows of different numbers goes unseen: rows off by one, a neighbour's logits, a commit past
    the verified rows, KV of a row that was not verified."""
    checked = ragged(bug, "--cases", "penalties")
    different = sum(case["different"] for case in checked.report["cases"])
    assert (checked.code, different > 0) == (1 if bug else 0, bool(bug)), (checked.shown, checked.said)


def _crossing_prompts() -> list[dict[str, Any]]:
    """Prompts for which the prefix cache keeps a state in the first half of the answer, some tokens before its end."""
    tokenizer = AutoTokenizer.from_pretrained(PAIRS["hybrid"][0])
    rows = []
    for each in held_out_prompts("arithmetic"):
        messages = [{"role": "user", "content": each.prompt}]
        asked = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        if asked < SNAPSHOT_EVERY and asked + len(tokenizer.encode(each.reference)) // 2 > SNAPSHOT_EVERY + 3:
            rows.append({"id": each.id, "messages": messages})
    assert len(rows) >= PROMPTS
    return rows[:PROMPTS]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Checked]]:
    """The pair with recurrent state."""
    folder = tmp_path_factory.mktemp("hybrid")
    target, draft = PAIRS["hybrid"]
    states = ["--max-mamba-cache-size", "64", "--mamba-track-interval", str(SNAPSHOT_EVERY)]
    pair = ["--model-path", target, "--draft", draft]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, _crossing_prompts())))
    asked = ["--prompts", folder / "prompts.jsonl", "--max-new-tokens", 96, "--cases", "continued"]
    words = [*asked, *pair, "--save-off", folder / "off.json", "--logs", folder, "--", *TINY_FLAGS, *states]
    unharmed = check_here(*words)
    assert unharmed.code == 0, unharmed.said
    flags = [*states, "--mamba-radix-cache-strategy", "extra_buffer"]
    with _planted_server(target, draft, folder, flags) as running:
        yield partial(_check_planted, running, folder)


@pytest.mark.parametrize("bug", ["", planted_bugs.LATE, planted_bugs.WINDOW, planted_bugs.SNAPSHOT])
def test_recurrent_state(hybrid: Callable[..., Checked], bug: str) -> None:
    """Fails where a wrong state goes unseen: of a request, of its convolutions, or of the prefix cache. The last one
    shows only in a request that continues another's answer."""
    checked = hybrid(bug, "--cases", "continued")
    different = {case["case"] for case in checked.report["cases"] if case["different"]}
    if not bug:
        assert checked.code == 0 and not different, checked.shown
    elif bug == planted_bugs.SNAPSHOT:
        assert checked.code == 1 and different == {"continued"}, checked.shown
    else:
        assert checked.code == 1 and "plain" in different, checked.shown


def interrupt(words: list[object], ready: Callable[[], bool]) -> list[psutil.Process]:
    """Presses Ctrl-C once `ready`; returns the processes that the command had started."""
    command = [*COMMAND, *map(str, words)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **TINY_ENVIRONMENT},
        # Where these tests run in the background of a shell, interrupts are ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said
    assert "stopped; no server of ours was left running" in said
    return children


def test_interrupt_stops_the_servers(folder: Path) -> None:
    """Fails where Ctrl-C leaves a server behind, or ends in a traceback or in a verdict."""
    log = folder / "interrupted" / "off.log"
    children = interrupt(["--logs", log.parent], lambda: log.is_file() and log.stat().st_size > 0)
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_interrupt_does_not_wait_for_answers(server: Server, clean: Checked, folder: Path) -> None:
    """Fails where Ctrl-C is heeded only when all requests are answered, or ends a server that is not ours."""
    asked = server.log.read_text().count("POST /generate")
    words = ["--base-url", server.url, "--off-from", folder / "off.json"]
    interrupt(words, lambda: server.log.read_text().count("POST /generate") > asked + 4)
    assert server.client().generate("Hello", max_new_tokens=2).ids


def test_a_server_that_ends_is_no_traceback(planted: Callable[..., Checked]) -> None:
    """Fails where a speculating server that dies under requests which the off arm served is not a verdict."""
    checked = planted(planted_bugs.CRASH, "--cases", "plain")  # the module's last test: the server is gone
    assert checked.code == 1
    assert any("stopped answering" in reason for reason in checked.report["failures"])
    assert "Traceback" not in checked.said

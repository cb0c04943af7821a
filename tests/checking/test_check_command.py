"""`sglang-dflash check` before it starts a server: what it refuses, and which servers it would start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.cli import check as module
from sglang_dflash.cli.check import CheckOptions, arms_of
from sglang_dflash.cli.main import run
from sglang_dflash.serving import TINY_DRAFT, Arm, ServerError


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> Any:
    """Runs the command in this process; returns exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["sglang-dflash", "check", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            run()
        return ended.value.code, *capsys.readouterr()

    return call


REFUSED = [
    (["--num-prompts", 0], "--num-prompts is 0; it must be at least 1."),
    (["--max-new-tokens", 1], "--max-new-tokens is 1; it must be at least 4."),
    (["--concurrency", 0], "--concurrency is 0; it must be at least 1."),
    (["--tie-ulps", -1], "--tie-ulps is -1.0; it must be 0 or more."),
    (["--cases", "plain,magic"], "--cases has 'magic'; it must name some of plain, "),
    (["--model-path", "t"], "--model-path and --draft belong together"),
    (["--base-url", "http://a"], "--base-url is given 1 times; it must be given twice"),
    (["--base-url", "http://a", "--base-url", "http://b", "--draft", "d"], "--base-url is given 2 times"),
    (["--prompts", "none.jsonl"], "--prompts is none.jsonl; it must be an existing JSONL file"),
    (["--prompts", "EMPTY"], "--prompts EMPTY has no prompts; it must have at least one."),
    (["--prompts", "WRONG"], "--prompts WRONG, line 2: it has the fields ['question']; it must have exactly one of "),
    (["--prompts", "TWICE"], "--prompts TWICE, line 1: it has the fields ['input_ids', 'text']"),
    (["--prompts", "NONE"], "--prompts NONE, line 1: input_ids must be a non-empty list of integers"),
    (["--off-from", "none.json"], "--off-from is none.json; it must be an existing file that --save-off wrote"),
    (["--off-from", "WRONG"], "--off-from WRONG cannot be read as a file of --save-off: "),
    (["--off-from", "OLD"], "--off-from OLD cannot be read as a file of --save-off: its format is 0"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(map(str, words)) for words, _ in REFUSED])
def test_refuses_in_a_sentence(words: list[object], said: str, call: Any) -> None:
    """Fails if a user error gives a traceback, several lines, or the exit code of a verdict."""
    Path("EMPTY").write_text("\n")
    Path("WRONG").write_text('{"text": "Hi"}\n{"question": "Hi"}\n')
    Path("TWICE").write_text('{"text": "Hi", "input_ids": [1]}\n')
    Path("NONE").write_text('{"input_ids": []}\n')
    Path("OLD").write_text(json.dumps({"format": 0}))
    code, out, err = call(*words)
    assert (code, out) == (2, "") and err.startswith(f"error: {said}") and err.count("\n") == 1, err


def test_servers_that_are_not_there(call: Any) -> None:
    """Fails if an address without a server gives a verdict or a traceback."""
    code, out, err = call("--base-url", "http://127.0.0.1:9", "--base-url", "http://127.0.0.1:9")
    assert (code, out) == (2, "")
    assert "error: No SGLang server answers at http://127.0.0.1:9: " in err and "Traceback" not in err


def test_a_server_that_does_not_start(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the reason does not reach the user."""

    def refuse(self: Any, *_: Any) -> None:
        raise ServerError("The server ended before it answered: no memory (log: x)")

    monkeypatch.setattr("sglang_dflash.serving.arms.Server.start", refuse)
    code, _, err = call()
    assert code == 2 and err.splitlines()[-1] == "error: The server ended before it answered: no memory (log: x)"


def test_ctrl_c(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an interrupt gives a verdict."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_check", interrupt)
    code, _, err = call()
    assert code == 130 and "stopped; no server of ours was left running" in err


def arms(*flags: str) -> tuple[Arm, Arm]:
    off, on = arms_of(CheckOptions(server_flags=flags))
    assert isinstance(off, Arm)
    return off, on


def test_the_arms_differ_in_speculation_alone() -> None:
    """Fails if the baseline runs with overlap or speculation, or a flag reaches only one arm."""
    off, on = arms("--page-size", "16", "--speculative-num-draft-tokens", "4", "--max-total-tokens", "999")
    assert "--disable-overlap-schedule" in off.arguments and "--disable-overlap-schedule" not in on.arguments
    assert not any("speculative" in word for word in off.arguments)
    assert on.arguments[-6:] == (
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(TINY_DRAFT)),
        *("--speculative-num-draft-tokens", "4"),
    )
    for arm in (off, on):
        assert arm.arguments[arm.arguments.index("--page-size") :][:2] == ("--page-size", "16")
        assert arm.arguments[-1 - arm.arguments[::-1].index("--max-total-tokens") :][1] == "999"

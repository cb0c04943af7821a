"""The command line: its commands, and one sentence instead of a traceback for every user error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import __version__
from sglang_dflash.cli.main import run
from sglang_dflash.serving import TINY_TARGET

GOOD = {"prompt": "Compute 9 * 7.", "response": "The answer is 63."}


def _lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def call(monkeypatch, tmp_path, capsys) -> Any:
    """Runs a command in this process; returns the exit code or the error message, standard output and error."""
    # A later run must not find the data that is tokenized here.
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def call(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["sglang-dflash", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            run()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (err[err.rindex("error: ") :].removesuffix("\n") if code == 1 else code), out, err

    return call


def test_version(call):
    """Fails if --version prints another version than the package's, or asks for a command."""
    assert call("--version")[:2] == (0, f"{__version__}\n")


def test_help_names_the_commands(call):
    """Fails if --help does not list a command."""
    code, out, _ = call("--help")
    assert code == 0
    assert re.search(r"^.*\btrain\b.*Train a DFlash draft", out, re.M)
    assert re.search(r"^.*\bregenerate\b.*Replace every assistant turn", out, re.M)
    assert re.search(r"^.*\bcheck\b.*Prove on your own models", out, re.M)
    assert re.search(r"^.*\bdoctor\b.*Find out why acceptance is low", out, re.M)
    assert re.search(r"^.*\bquickstart\b.*Serve a pair", out, re.M)
    assert re.search(r"^.*\bfetch\b.*Make a published model", out, re.M)
    assert re.search(r"^.*\bbench\b.*Measure how fast", out, re.M)
    assert re.search(r"^.*\bgenerate\b.*Answer one prompt", out, re.M)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", ["--target", "--taps"]),
        ("regenerate", ["DATA"]),
        ("quickstart", ["--keep", "--pair"]),
        ("doctor", ["--draft", "--no-flags", "--expect-tau", "--off-url", "--json"]),
        ("bench", ["--arms", "--workload", "--budget-s"]),
    ],
)
def test_help_of_a_command(command, flags, call):
    """Fails if a command does not explain its flags."""
    code, out, _ = call(command, "--help")
    assert code == 0 and all(flag in out for flag in flags)


TRAIN = [
    ({"--data": "/nowhere.jsonl"}, "--data is /nowhere.jsonl; it must be an existing JSONL file"),
    ({"--taps": "1,two"}, "--taps is '1,two'; it must be layer numbers"),
    ({"--taps": ""}, "--taps is ''; it must be layer numbers"),
    ({"--chat-template-kwargs": "{thinking: no}"}, "--chat-template-kwargs is '{thinking: no}'; it must be a JSON"),
    ({"--chat-template-kwargs": "[1]"}, "--chat-template-kwargs is '[1]'; it must be a JSON object"),
    ({"--target": "/nowhere/target"}, "The target /nowhere/target cannot be read"),
    ({"--taps": "1,5"}, "--taps has [5]; a draft can read layers 0 to 4"),
    ({"--mask-token-id": 1792}, "--mask-token-id is 1792; it must be a row of the target's embedding, 0 to 1791"),
    ({"--block-size": 1}, "--block-size is 1; it must be at least 2"),
    ({"--loss": "kl"}, "--loss is kl; it must be one of decay, dpace"),
]


@pytest.mark.parametrize(("changes", "said"), TRAIN, ids=[" ".join(map(str, *case[0].items())) for case in TRAIN])
def test_train_refuses_in_a_sentence(changes, said, call, tmp_path):
    """Fails if a user error gives a traceback, several lines or success."""
    data = _lines(tmp_path / "data.jsonl", GOOD, GOOD)
    flags = {"--target": TINY_TARGET, "--data": data, "--output": tmp_path / "draft", "--layers": 1, **changes}
    sentence, _, _ = call("train", *(word for flag in flags.items() for word in flag))
    assert isinstance(sentence, str) and sentence.startswith(f"error: {said}")
    assert "\n" not in sentence
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "Hi"}, {"prompt": "Ho"}], "holds nothing to learn"),
        ([GOOD, {"text": "Hi"}], "line 2: it has the keys ['text']"),
    ],
)
def test_train_refuses_data_in_a_sentence(rows, said, call, tmp_path):
    """Fails if data without anything to learn starts a run."""
    data = _lines(tmp_path / "data.jsonl", *rows)
    sentence, _, _ = call(
        "train", "--target", TINY_TARGET, "--data", data, "--output", tmp_path / "draft", "--layers", 1
    )
    assert sentence.startswith("error: ") and said in sentence and "\n" not in sentence


REGENERATE = [
    (["/nowhere.jsonl"], "DATA is /nowhere.jsonl; it must be an existing JSONL file"),
    (["DATA", "--max-new-tokens", 0], "--max-new-tokens is 0; it must be at least 1"),
    (["DATA", "--concurrency", 0], "--concurrency is 0; it must be at least 1"),
    (["DATA", "--temperature", -1], "--temperature is -1.0; it must be 0 or more"),
    (["DATA", "--chat-template-kwargs", "no"], "--chat-template-kwargs is 'no'; it must be a JSON object"),
    (["DATA", "--target", "/nowhere/target"], "--target /nowhere/target: its tokenizer cannot be read"),
    (["WRONG"], "DATA WRONG, line 2: it has the keys ['text']"),
    (["TEXT"], "DATA TEXT, line 1: "),
    (["EMPTY"], "DATA EMPTY holds no conversation"),
]


@pytest.mark.parametrize(("words", "said"), REGENERATE, ids=[" ".join(map(str, case[0])) for case in REGENERATE])
def test_regenerate_refuses_in_a_sentence(words, said, call, tmp_path, monkeypatch):
    """Fails if a user error gives a traceback or several lines, or is found only after a server was started."""
    monkeypatch.chdir(tmp_path)
    _lines(Path("DATA"), GOOD)
    _lines(Path("WRONG"), GOOD, {"text": "Hi"})
    Path("TEXT").write_text("Hi there\n")
    Path("EMPTY").write_text("\n")
    data, *flags = words
    if "--target" not in flags:
        flags += ["--target", TINY_TARGET]
    sentence, _, _ = call("regenerate", data, "out.jsonl", *flags)
    assert isinstance(sentence, str) and sentence.startswith(f"error: {said}"), sentence
    assert "\n" not in sentence
    assert not Path("out.jsonl.partial").exists()


def test_regenerate_beside_several_processes_is_refused(call, tmp_path, monkeypatch):
    """Fails if every process under torchrun starts its own server."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    data = _lines(tmp_path / "data.jsonl", GOOD, GOOD)
    flags = ["--target", TINY_TARGET, "--data", data, "--output", tmp_path / "draft", "--regenerate"]
    assert "--regenerate runs in one process" in call("train", *flags)[0]


def test_an_error_as_the_shell_sees_it():
    """Fails if the message is not on standard error only, or the exit code means success."""
    command = [sys.executable, "-m", "sglang_dflash.cli", "train"]
    command += ["--target", "t", "--data", "/no.jsonl", "--output", "o"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: --data is /no.jsonl; it must be an existing JSONL file.\n"


def test_a_command_line_that_cannot_be_read(call):
    """Fails if an unknown flag is accepted, or a missing one is not noticed."""
    assert call("train", "--layres", "3")[0] == 2
    code, _, err = call("train")
    assert code == 2 and "--target" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("bench", "--arms", "nope"), "error: --arms has nope"),
        (("bench", "--no-such-flag"), "--no-such-flag"),
        (("quickstart", "--pair", "nope"), "--pair is nope; choose from smollm2, tiny, hybrid"),
    ],
)
def test_a_wrong_option_is_exit_code_2(words, sentence, call):
    """Fails where a command whose exit code 1 is a finding ends with it over a wrong option, or in a traceback."""
    code, _, error = call(*words)
    assert code == 2 and sentence in error and "Traceback" not in error

"""Every dataset gives sessions in a fixed order; a dataset that cannot be loaded ends in one sentence."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from sglang_dflash.serving import KINDS
from sglang_dflash.serving.sessions import Message, Session, Turn
from sglang_dflash.workloads import hub_datasets
from sglang_dflash.workloads.datasets import load
from sglang_dflash.workloads.hub_datasets import HUB

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gsm8k": ({"question": "1+1?", "answer": "2"}, ["1+1?" + BOXED]),
    "math500": ({"problem": "$x$?", "solution": "", "answer": ""}, ["$x$?" + BOXED]),
    "aime24": ({"problem": "$x$?", "solution": "", "answer": "", "year": "2024"}, ["$x$?" + BOXED]),
    "aime25": ({"problem_idx": 1, "problem": "$x$?", "answer": 2}, ["$x$?" + BOXED]),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():", "test": "", "entry_point": "f"},
        ["Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n```"],
    ),
    "mbpp": ({"task_id": 2, "prompt": "Write f.", "code": "", "test_list": []}, ["Write f."]),
    "swe-bench": (
        {"instance_id": "a__b-1", "problem_statement": "It fails."},
        ["Problem Statement:\nIt fails.\nPlease fix the issue described above."],
    ),
    "mt-bench": ({"prompt": ["First?", "And then?"], "category": "maths", "reference": []}, ["First?", "And then?"]),
    "alpaca": ({"instruction": "Sort.", "input": "b, a", "output": "a, b"}, ["Sort.\n\nInput:\nb, a"]),
}
OFFLINE_WORDS = (
    "gsm8k",
    "openai/gsm8k",
    "not in the cache",
    "load_dataset('openai/gsm8k', 'main'",
    "HF_HOME",
    ".jsonl",
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hub that returns `rows` and records how it was called."""
    held: dict[str, Any] = {"rows": [], "asked": []}

    def load_dataset(*names: object, **how: object) -> list[dict]:
        held["asked"].append((names, how))
        return held["rows"]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub_datasets, "_answers", lambda endpoint: True)
    return held


@pytest.fixture
def empty_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty caches for this test only."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


def texts(session: Session) -> list[str]:
    assert all(message.role == "user" for turn in session.turns for message in turn.messages)
    return [message.content for turn in session.turns for message in turn.messages]


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_the_prompts_that_others_ask(name: str, hub: dict[str, Any]) -> None:
    """Fails where a dataset's repository, configuration, split, columns or wording is not the common one."""
    row, expected = ROWS[name]
    hub["rows"] = [row]
    (session,) = load(name, None, 0)
    assert texts(session) == expected and len(session.turns) == len(expected)
    assert session.id == f"{name}-0"
    assert hub["asked"] == [((HUB[name].repo, HUB[name].config or None), {"split": HUB[name].split})]


def test_every_hub_dataset_is_tried() -> None:
    """Fails where a dataset is added without a row here."""
    assert {*ROWS, "livecodebench"} == set(HUB)


def test_alpaca_without_input(hub: dict[str, Any]) -> None:
    """Fails where an empty input still gets a heading."""
    hub["rows"] = [{"instruction": "Sing.", "input": "", "output": ""}]
    assert texts(load("alpaca", 1, 0)[0]) == ["Sing."]


def test_livecodebench_from_the_file_cache(empty_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where cached files cannot be read without a network, or the starter code is not in the prompt."""
    monkeypatch.setattr(hub_datasets, "_answers", lambda endpoint: False)
    repo = empty_caches / "hub" / "datasets--livecodebench--code_generation_lite"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("c0ffee")
    (repo / "snapshots/c0ffee").mkdir(parents=True)
    for number, file in enumerate(HUB["livecodebench"].files):
        row = {"question_content": f"Question {number}?", "starter_code": "class S:" if number else "", "platform": "x"}
        (repo / "snapshots/c0ffee" / file).write_text(json.dumps(row) + "\n")
    sessions = sorted(load("livecodebench", None, 0), key=lambda session: session.id)
    prompts = [texts(session)[0] for session in sessions]
    assert [f"### Question:\nQuestion {n}?\n\n### Format: " in prompt for n, prompt in enumerate(prompts)] == [True] * 6
    assert "following format:\n```python\n# YOUR CODE HERE\n```\n\n### Answer:" in prompts[0]
    assert all("code structure:\n```python\nclass S:\n```\n\n### Answer:" in prompt for prompt in prompts[1:])


def test_dataset_cache_without_a_network(
    empty_caches: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails where a dataset that was loaded once cannot be loaded again offline, or the library logs a warning."""
    source = tmp_path / "gsm8k" / "main.jsonl"
    source.parent.mkdir()
    source.write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    built = datasets.load_dataset("json", "main", data_files={"test": str(source)})["test"]
    held = Path(built.cache_files[0]["filename"]).parent
    cached = empty_caches / "datasets/openai___gsm8k/main/0.0.0/c0ffee"
    cached.mkdir(parents=True)
    info = json.loads((held / "dataset_info.json").read_text()) | {"config_name": "main", "dataset_name": "gsm8k"}
    (cached / "dataset_info.json").write_text(json.dumps(info))
    (cached / "gsm8k-test.arrow").write_bytes((held / "json-test.arrow").read_bytes())
    monkeypatch.setattr(hub_datasets, "_answers", lambda endpoint: False)
    heard = logging.getLogger("datasets")
    heard.addHandler(caplog.handler)  # it does not propagate
    try:
        assert [texts(session) for session in load("gsm8k", None, 0)] == [["1+1?" + BOXED]]
    finally:
        heard.removeHandler(caplog.handler)
    assert not caplog.records


def test_hub_samples_are_seeded_and_grow(hub: dict[str, Any]) -> None:
    """Fails where a sample is no permutation, changes between calls, or is not the start of a larger sample."""
    hub["rows"] = [{"prompt": f"p{n}"} for n in range(50)]
    everything = load("mbpp", None, 3)
    assert sorted(s.turns[0].messages[0].content for s in everything) == sorted(row["prompt"] for row in hub["rows"])
    assert all(s.id == "mbpp-" + s.turns[0].messages[0].content[1:] for s in everything)
    for count in (1, 7, 49):
        assert load("mbpp", count, 3) == everything[:count]
    assert load("mbpp", 10, 3) != load("mbpp", 10, 4)
    assert len(load("mbpp", 99, 3)) == 50


def test_changed_columns_are_named(hub: dict[str, Any]) -> None:
    """Fails where a dataset whose columns changed on the hub ends in a KeyError."""
    hub["rows"] = [{"text": "x"}]
    with pytest.raises(ValueError, match=r"mbpp has no column 'prompt'"):
        load("mbpp", 1, 0)


def test_offline_is_one_sentence_soon_and_quietly(
    empty_caches: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails where the library retries (23 s) or prints, or the message lacks the name, the reason or a remedy.

    The library is the real one; the hub is a port of this machine without a listener.
    """
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    levels = [logging.getLogger(name).level for name in ("datasets", "huggingface_hub")]
    start = time.perf_counter()
    with pytest.raises(ValueError) as caught:
        load("gsm8k", 1, 0)
    assert time.perf_counter() - start < 2 * hub_datasets.PROBE_S
    sentence = str(caught.value)
    assert all(word in sentence for word in (*OFFLINE_WORDS, "http://127.0.0.1:9 cannot be reached")), sentence
    assert "\n" not in sentence and capfd.readouterr() == ("", "") and not caplog.records
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE
    assert levels == [logging.getLogger(name).level for name in ("datasets", "huggingface_hub")]
    with pytest.raises(ValueError, match=r"not in the cache, .* `hf download livecodebench/code_generation_lite test"):
        load("livecodebench", 1, 0)


def test_offline_by_the_users_wish(empty_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where HF_HUB_OFFLINE is ignored, or the message does not name it as the reason."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_datasets, "_answers", lambda endpoint: pytest.fail("the network was tried"))
    with pytest.raises(ValueError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        load("aime24", 1, 0)
    assert constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_other_failures_keep_their_reason(
    monkeypatch: pytest.MonkeyPatch, hub: dict[str, Any], kind: type[Exception]
) -> None:
    """Fails where a failure with a network is reported as a missing network, or as a traceback."""

    def refused(*names: object, **how: object) -> None:
        raise kind("Dataset scripts are no longer supported,\nbut found x.py")

    monkeypatch.setattr(datasets, "load_dataset", refused)
    with pytest.raises(ValueError, match=rf"loaded \({kind.__name__}: Dataset scripts are no longer supported, but"):
        load("alpaca", 1, 0)


def test_a_silent_network_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where the probe waits longer than PROBE_S for a network that does not answer."""
    monkeypatch.setattr(hub_datasets, "PROBE_S", 0.1)
    monkeypatch.setattr(hub_datasets.httpx, "head", lambda *args, **how: time.sleep(3))
    start = time.perf_counter()
    assert not hub_datasets._answers("http://silent.invalid")
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("name", ["gsm9k", "openai/gsm8k", "prompts.json"])
def test_unknown_names(name: str) -> None:
    """Fails where an unknown name reaches the network, or the message does not list the allowed names."""
    with pytest.raises(
        ValueError, match=rf"--dataset-name {name} is unknown; .*gsm8k, .*mt-bench, .*tiny, or .*\.jsonl"
    ):
        load(name, 1, 0)


def test_no_prompts_asked_for() -> None:
    """Fails where a count below one gives no or all prompts."""
    with pytest.raises(ValueError, match="0 prompts requested"):
        load("tiny", 0, 0)


def test_bundled_kinds() -> None:
    """Fails where a kind has another's prompts, `tiny` does not alternate the three, or a seed changes the order."""
    for kind in KINDS:
        sessions = load(kind, None, 0)
        assert len(sessions) > 100 and all(session.id.startswith(kind) for session in sessions)
    mixed = load("tiny", 6, 0)
    assert [session.id.split("-")[0] for session in mixed] == [*KINDS, *KINDS]
    assert mixed == load("tiny", 6, 1) == load("tiny", None, 0)[:6]
    ids = [session.id for session in load("tiny", None, 0)]
    assert len(ids) == len(set(ids)) == sum(len(load(kind, None, 0)) for kind in KINDS)


def written(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_jsonl_fields(tmp_path: Path) -> None:
    """Fails where a documented field is ignored, an answer becomes a prompt, or the file's order changes."""
    separator = "one\u2028line"  # str.splitlines() splits it
    chat = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "the answer")]
    path = written(
        tmp_path,
        {"prompt": separator, "answer": "x", "solution": "y"},
        "",
        {"id": 7, "system": "S", "turns": ["a", "b"], "chat_template_kwargs": {"enable_thinking": False}},
        {"id": "chat", "messages": [{"role": role, "content": content} for role, content in chat]},
        {"id": "ids", "input_ids": [5, 0, 6]},
        {"id": "raw", "text": "def f("},
    )
    expected = [
        Session.of_texts("line-1", [separator]),
        Session("7", Session.of_texts("", ["a", "b"], "S").turns, {"enable_thinking": False}),
        Session("chat", (Turn(tuple(Message(*message) for message in chat[:4])),)),
        Session("ids", (Turn(()),), {}, (5, 0, 6)),
        Session("raw", (Turn(()),), text="def f("),
    ]
    assert load(path, None, 0) == load(path, 9, 1) == expected
    assert load(path, 2, 0) == expected[:2]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "it is not valid JSON"),
        ([1], "must be a JSON object"),
        (
            {"question": "x"},
            r"fields \['question'\]; .* exactly one of prompt, text, messages, turns, input_ids",
        ),
        ({"prompt": "x", "turns": ["x"]}, "exactly one of"),
        ({"text": "x", "prompt": "x"}, "exactly one of"),
        ({"text": ""}, "text must be a non-empty string"),
        ({"text": "x", "system": "S"}, "both `system` and `text`"),
        ({"prompt": ""}, "prompt must be a non-empty string"),
        ({"prompt": ["x"]}, "prompt must be a non-empty string"),
        ({"turns": []}, "turns must be a non-empty list of non-empty strings"),
        ({"turns": ["a", ""]}, "turns must be a non-empty list of non-empty strings"),
        ({"messages": "x"}, "messages must be a list of objects"),
        ({"messages": []}, "messages must contain a user message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages must contain a user message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'; .*as a user message"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content of a message .* must be a string"),
        ({"system": "S", "messages": [{"role": "system", "content": "T"}]}, "both `system` and messages"),
        ({"input_ids": [1, True]}, "input_ids must be"),
        ({"input_ids": [-1]}, "input_ids must be"),
        ({"input_ids": []}, "input_ids must be"),
        ({"input_ids": [1], "system": "S"}, "both `system` and `input_ids`"),
        ({"prompt": "x", "system": 1}, "system is 1; it must be a string"),
        ({"prompt": "x", "id": None}, "id is None"),
        ({"prompt": "x", "chat_template_kwargs": []}, r"chat_template_kwargs is \[\]; it must be an object"),
        ('{"prompt": "a \\ud83d b"}', r"prompt has half a character, \\ud83d, behind its first 2 characters"),
        ('{"turns": ["x", "\\ud83d"]}', r"turns\[1\] has half a character"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', r"messages\[0\].content has half a character"),
        ({"prompt": "x", "id": "first"}, "the id first is already used in line 1"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path: Path, row: Any, said: str) -> None:
    """Fails where a wrong line is accepted or skipped, or the message does not name it."""
    path = written(tmp_path, {"id": "first", "prompt": "x"}, row)
    with pytest.raises(ValueError, match=rf"^--dataset-name {path}, line 2: .*{said}"):
        load(path, None, 0)


def test_jsonl_files_that_hold_nothing(tmp_path: Path) -> None:
    """Fails where a missing, an empty or a binary file gives an empty dataset or a traceback."""
    with pytest.raises(ValueError, match=r"missing\.jsonl; it must be an existing JSONL file"):
        load(str(tmp_path / "missing.jsonl"), None, 0)
    with pytest.raises(ValueError, match="has no prompts"):
        load(written(tmp_path, ""), None, 0)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        load(str(binary), None, 0)

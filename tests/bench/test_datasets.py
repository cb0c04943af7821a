"""Every dataset gives sessions in a fixed order; a dataset that cannot be loaded ends in one sentence."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from sglang_dflash.bench.datasets import AGENTS, HUB, LONG_CONTEXT, agent_sessions, load
from sglang_dflash.serving import KINDS, TINY_TARGET
from sglang_dflash.serving.prompts import read_prompts
from sglang_dflash.serving.rendering import Renderer, prompt_of
from sglang_dflash.serving.sessions import Message, Session

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gsm8k": ({"question": "1+1 {?}", "answer": "2"}, ["1+1 {?}" + BOXED]),
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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hub that returns `rows` and records how it was called."""
    held: dict[str, Any] = {"rows": [], "asked": []}

    def load_dataset(*names: object, **how: object) -> list[dict]:
        held["asked"].append((names, how))
        return held["rows"]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return held


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
    assert hub["asked"] == [((HUB[name].repo, HUB[name].config), {"split": HUB[name].split})]


def test_every_hub_dataset_is_tried(hub: dict[str, Any]) -> None:
    """Fails where a dataset is added without a row here, or an empty input still gets a heading."""
    assert {*ROWS, "livecodebench"} == set(HUB)
    hub["rows"] = [{"instruction": "Sing.", "input": "", "output": ""}]
    assert texts(load("alpaca", 1, 0)[0]) == ["Sing."]


def test_livecodebench_from_the_file_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails where cached files cannot be read without a network, or the starter code is not in the prompt."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    repo = tmp_path / "hub" / "datasets--livecodebench--code_generation_lite"
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


def test_what_cannot_be_loaded_is_one_sentence(monkeypatch: pytest.MonkeyPatch, hub: dict[str, Any]) -> None:
    """Fails where a failure or a changed column ends in a traceback, or the sentence lacks the reason or a remedy."""
    hub["rows"] = [{"text": "x"}]
    with pytest.raises(ValueError, match=r"mbpp has no column 'prompt'"):
        load("mbpp", 1, 0)

    def refused(*names: object, **how: object) -> None:
        raise RuntimeError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", refused)
    with pytest.raises(ValueError, match=r"loaded \(RuntimeError: Couldn't reach the hub\); fill the cache") as error:
        load("gsm8k", 1, 0)
    assert "load_dataset('openai/gsm8k', 'main'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gsm9k", "openai/gsm8k", "prompts.json"])
def test_unknown_names(name: str) -> None:
    """Fails where an unknown name reaches the network, or the message does not list the allowed names."""
    said = rf"--dataset-name {name} is unknown; .*gsm8k, .*mt-bench, .*tiny, or .*\.jsonl"
    with pytest.raises(ValueError, match=said):
        load(name, 1, 0)


def test_bundled_kinds() -> None:
    """Fails where a kind has another's prompts, `tiny` does not alternate the three, or a seed changes the order."""
    for kind in KINDS:
        sessions = load(kind, None, 0)
        assert len(sessions) > 100 and all(session.id.startswith(kind) for session in sessions)
    mixed = load("tiny", 6, 0)
    assert [session.id.split("-")[0] for session in mixed] == [*KINDS, *KINDS]
    assert mixed == load("tiny", 6, 1) == load("tiny", None, 0)[:6]


@pytest.mark.parametrize(("context", "turns"), [(LONG_CONTEXT, range(6, 13)), (LONG_CONTEXT - 1, range(6, 10))])
def test_agents_get_a_task_of_the_dataset_and_our_later_turns(context: int, turns: range) -> None:
    """Fails where sessions lack a task or a number of turns, share one prefix or none, or more sessions change them."""
    tasks = load("tiny", 40, 0)
    sessions = agent_sessions(tasks, 32, context)
    assert len(sessions) == 32 and len({session.id for session in sessions}) == 32
    assert sessions[:5] == agent_sessions(tasks[:10], 5, context)
    assert {len(session.turns) for session in sessions} == set(turns)
    for session, task in zip(sessions, tasks, strict=False):
        assert [message.role for message in session.turns[0].messages] == ["system", "user"]
        assert session.turns[0].messages[1] == task.turns[0].messages[0]
        assert all([message.role for message in turn.messages] == ["user"] for turn in session.turns[1:])
    shared = Counter(session.turns[0].messages[0].content for session in sessions)
    assert set(shared.values()) == {8}


def test_agents_play_sessions_of_several_turns_as_they_are(tmp_path: Path) -> None:
    """Fails where a user's own sessions get our turns, or a prompt without a user is a task."""
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"system": "S", "turns": ["a", "b"]}) + "\n" + json.dumps({"prompt": "c"}) + "\n")
    own = load(str(path), None, 0)
    assert agent_sessions(own, 1, 2048) == own[:1]
    path.write_text(json.dumps({"text": "c"}))
    with pytest.raises(ValueError, match="--workload agent: session line-1 has no user message"):
        agent_sessions(load(str(path), None, 0), 1, 2048)


def test_short_sessions_fit_the_embedded_pair() -> None:
    """Fails where answers of 96 tokens end a session of the embedded pair early, whose context has 2,048."""
    renderer = Renderer(str(TINY_TARGET), {})
    answer = Message("assistant", "x = 1\n" * 24)
    assert renderer.count(answer.content) >= 96
    for session in read_prompts(AGENTS / "2k.jsonl", "--workload agent"):
        chat = [message for turn in session.turns for message in (*turn.messages, answer)]
        assert len(prompt_of(session, chat[:-1], renderer)) + 96 <= 2048, session.id

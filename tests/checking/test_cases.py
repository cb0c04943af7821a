"""The matrix of cases, the prompts and the markers of a check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from sglang_dflash.checking.cases import CASES, REGEX, Asked, Case, random_sampling, select
from sglang_dflash.checking.compare import Request
from sglang_dflash.checking.probes import code_words, foreign_markers
from sglang_dflash.serving import Completion
from sglang_dflash.serving.prompts import bundled_prompts, read_prompts
from sglang_dflash.serving.sessions import Message

TEXT = "The answer is forty-two, as always."
ASKED = [
    Asked(f"p{n}", [1, 2, 3 + n], Completion(ids=[5, 6, 5, 7, 8, 5, 9 + n], text=TEXT, finish={"type": "stop"}), 32)
    for n in range(6)
]


def requests_of(case: Case, seed: int) -> list[Request]:
    return [case.request(one, seed) for one in ASKED]


BY_NAME = {case.name: case for case in CASES}


def test_every_parameter_has_a_case() -> None:
    """Fails if no case uses a parameter that a worker might ignore."""
    asked = {name for case in CASES for request in requests_of(case, 0) for name in _given(request.body)}
    assert asked >= {
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "logit_bias", "stop"),
        *("stop_token_ids", "ignore_eos", "regex", "json_schema", "return_logprob", "sampling_seed", "min_p"),
    }
    assert all(case.deterministic == any(r.sampled for r in requests_of(case, 0)) for case in CASES)


def _given(body: dict) -> set[str]:
    return {*body["sampling_params"], *body}


def test_cases_are_reproducible_and_differ_by_request() -> None:
    """Fails if a seed does not give the same requests again, or `mixed` gives all requests the same parameters."""
    mixed = BY_NAME["mixed"]
    assert requests_of(mixed, 3) == requests_of(mixed, 3) != requests_of(mixed, 4)
    assert len({json.dumps(r.body["sampling_params"], sort_keys=True) for r in requests_of(mixed, 3)}) > 3


def test_cases_aim_at_the_plain_answer() -> None:
    """Fails if a stop, a bias or a minimum would change nothing."""
    for asked in ASKED:

        def sampling(name: str, asked: Asked = asked) -> dict:
            return BY_NAME[name].request(asked, 0).body["sampling_params"]

        assert sampling("stop")["stop"][0] in asked.plain.text
        assert sampling("stop_token_ids")["stop_token_ids"][0] in asked.plain.ids
        assert len(asked.plain.ids) < sampling("min_new_tokens")["min_new_tokens"] <= asked.limit
        assert sampling("logit_bias")["logit_bias"]["5"] < 0


@pytest.mark.parametrize("seed", range(40))
def test_random_parameters_are_valid(seed: int) -> None:
    """Fails if the mixed case sends parameters that every server refuses."""
    sampling = random_sampling(ASKED[0], Random(seed))
    assert 1 <= sampling["max_new_tokens"] <= 32
    assert 0 <= sampling.get("min_new_tokens", 0) <= sampling["max_new_tokens"]
    assert not ("regex" in sampling and "json_schema" in sampling)
    assert 0 < sampling.get("repetition_penalty", 1) <= 2 and abs(sampling.get("frequency_penalty", 0)) <= 2


def test_empty_answers_have_cases_too() -> None:
    """Fails if a prompt whose answer is only the end token breaks the matrix."""
    empty = Asked("p", [1], Completion(ids=[2], text=""), 32)
    for case in CASES:
        case.request(empty, 0)


def test_select() -> None:
    """Fails if `plain`, from which the other cases are made, can be left out."""
    assert [case.name for case in select("stop, regex")] == ["plain", "stop", "regex"]
    with pytest.raises(ValueError, match="--cases has 'regexp'; it must name some of plain, "):
        select("regexp")


def test_regex_is_one() -> None:
    """Fails if the bundled regex matches nothing."""
    assert re.fullmatch(REGEX, "maybe this is how it goes.")


def test_markers() -> None:
    """Fails if code words repeat or contain each other, or a foreign one is overlooked."""
    words = code_words(Random(0), 40)
    assert len(set(words)) == 40 and not any(a in b for a in words for b in words if a != b)
    said = Completion(ids=[1], text=f"{words[0]} and {words[1]}")
    assert foreign_markers(words[0], said, words) == [words[1]]
    assert foreign_markers(words[0], Completion(refusal="no"), words) == []


def test_bundled_prompts_take_turns() -> None:
    """Fails if a few prompts are all of one kind."""
    kinds = [prompt.id.split("-")[0] for prompt in bundled_prompts()[:7]]
    assert kinds == ["arithmetic", "code", "chat"] * 2 + ["arithmetic"]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """Fails if a form is not read, or more prompts are read than requested."""
    rows = [
        {"text": "Hi", "id": "greeting"},
        {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"a": 1}},
        {"input_ids": [1, 2]},
        {"prompt": "Hi", "system": "S"},
        {"turns": ["Hi", "Ho"]},
        {"text": "left out"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    prompts = read_prompts(path, "--prompts", 5)
    assert [p.id for p in prompts] == ["greeting", "line-2", "line-3", "line-4", "line-5"]
    user = Message("user", "Hi")
    assert (prompts[0].text, prompts[2].input_ids) == ("Hi", (1, 2))
    assert [p.turns[0].messages for p in prompts] == [(), (user,), (), (Message("system", "S"), user), (user,)]
    assert prompts[1].template == {"a": 1}

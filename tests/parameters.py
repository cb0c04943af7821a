"""Requests with parameters, one by one and in drawn combinations; how their answers are compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from equality import TIES
from sglang_dflash.serving import Client

MAX_NEW_TOKENS = 48
COMBINATIONS = 40
SEED = 20261121
LOGPROB_TOLERANCE = 1e-4

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 999}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
STRUCTURAL_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
    "triggers": ["<call>"],
}

# Greedy requests with one sampling parameter each, at values that change answers of the embedded pair.
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "frequency_penalty<0": {"frequency_penalty": -1.7},
    "presence_penalty": {"presence_penalty": 2.0},
    "presence_penalty<0": {"presence_penalty": -1.9},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "repetition_penalty<1": {"repetition_penalty": 0.4},
    "all penalties": {"frequency_penalty": 1.1, "presence_penalty": 0.7, "repetition_penalty": 1.6},
    "min_new_tokens": {"min_new_tokens": 43},
    "min_new_tokens, stop_token_ids": {"min_new_tokens": 21, "stop_token_ids": [11, 13, 198, 220]},
    "logit_bias": {"logit_bias": {"11": 9.0, "13": -100.0, "220": 7.5, "198": -9.0}},
    "stop": {"stop": ["is", " the", "="]},
    "stop, no_stop_trim": {"stop": ["is", " the", "="], "no_stop_trim": True},
    "stop_token_ids": {"stop_token_ids": [13, 220]},
    "stop_regex": {"stop_regex": ["[0-9]{2}", "[a-z]+ [a-z]+ "]},
    "ignore_eos": {"ignore_eos": True},
    "max_new_tokens": {"max_new_tokens": 5},
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": "[0-9 +=]{5,30}\\."},
    "ebnf": {"ebnf": 'root ::= ("yes" | "no" | "maybe ") root | "end"'},
    "regex, ignore_eos": {"regex": "[0-9 +=]{5,12}", "ignore_eos": True},
    "json_schema, ignore_eos": {"json_schema": json.dumps(SCHEMA), "ignore_eos": True, "max_new_tokens": 100},
    "structural_tag": {"structural_tag": json.dumps(STRUCTURAL_TAG)},
    "n": {"n": 3},
    "top_k, top_p, min_p beside temperature 0": {"top_k": 7, "top_p": 0.5, "min_p": 0.1},
    "skip_special_tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
}

# Requests with one field of the body each.
BODIES: dict[str, dict[str, Any]] = {
    "logprobs": {"return_logprob": True},
    "top logprobs": {"return_logprob": True, "top_logprobs_num": 3},
    "listed logprobs": {"return_logprob": True, "token_ids_logprob": [3, 11, 13]},
    "prompt logprobs": {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
    "logprob text": {"return_logprob": True, "return_text_in_logprobs": True},
    "hidden states": {"return_hidden_states": True},
    "sampling mask": {"return_sampling_mask": True},
}

# Sampled and seeded requests whose answers say which tokens each was drawn from.
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask": ({"temperature": 1.5, "top_k": 5}, {"return_sampling_mask": True}),
    "mask, min_p": ({"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05}, {"return_sampling_mask": True}),
    "mask, all logprobs": (
        {"temperature": 2.0, "top_k": 20},
        {"return_sampling_mask": True, "sampling_logprobs_mode": "support"},
    ),
}

# Sampled requests with one parameter each; every request also gets a seed.
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "temperature 2": {"temperature": 2.0},
    "top_k": {"temperature": 1.5, "top_k": 5},
    "top_k 1": {"temperature": 1.5, "top_k": 1},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "all filters": {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "grammar": {"temperature": 1.5, "regex": "[0-9 +=]{5,30}\\."},
}

TOOL = {"type": "function", "function": {"name": "record", "description": "Records it.", "parameters": SCHEMA}}
CHAT: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_completion_tokens": {"max_completion_tokens": 6},
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.4, "min_tokens": 30},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "presence_penalty": 1.0},
    "logit_bias": {"logit_bias": {"11": 9, "220": 7, "198": -9}},
    "n, stop": {"n": 2, "stop": ["is", "="]},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "json_object": {"response_format": {"type": "json_object"}},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "named tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "record"}}},
    "regex": {"regex": "[0-9 +=]{5,30}"},
    "continue_final_message": {"continue_final_message": True},
}
COMPLETION: dict[str, dict[str, Any]] = {
    "plain": {},
    "echo, logprobs": {"echo": True, "logprobs": 2},
    "penalties, n": {"n": 2, "frequency_penalty": 1.5, "presence_penalty": 1.0},
    "stop": {"stop": ["is", "="], "no_stop_trim": True},
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "suffix of fields": {"min_tokens": 20, "stop_token_ids": [13, 220], "skip_special_tokens": False},
}


def openai_requests(question: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of the varied field -> path and body of the request."""
    common = {"model": "m", "temperature": 0, "max_tokens": MAX_NEW_TOKENS}
    messages = [{"role": "user", "content": question}]
    chats = {
        f"chat: {name}": ("/v1/chat/completions", {"messages": messages, **common, **fields})
        for name, fields in CHAT.items()
    }
    continued = chats["chat: continue_final_message"][1]
    continued["messages"] = [*messages, {"role": "assistant", "content": "The answer"}]
    del chats["chat: max_completion_tokens"][1]["max_tokens"]
    completions = {
        f"completion: {name}": ("/v1/completions", {"prompt": question, **common, **fields})
        for name, fields in COMPLETION.items()
    }
    return chats | completions


def openai_answer(client: Client, request: tuple[str, dict[str, Any]]) -> Any:
    """Choices and token counts of the answer, without fields that differ between calls."""
    answer = client.post(*request).json()
    assert "choices" in answer, (request, answer)
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            call.pop("id")
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": answer["choices"], **usage}


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `name` is what it varies."""

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    body: dict[str, Any] = field(default_factory=dict)

    def send(self, client: Client, **body: Any) -> Any:
        """The answer, or the error: if a grammar must end while `min_new_tokens` forbids it, the request fails."""
        sampling = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS, **self.sampling}
        body = {"input_ids": self.prompt, "sampling_params": sampling, **self.body, **body}
        return client.post("/generate", body).json()


def ask_oracle(client: Client, requests: Sequence[Request]) -> list[Any]:
    """Answers of the baseline: each request alone, with every token's two best logprobs for the tie rule."""
    return [
        request.send(client, return_logprob=True, top_logprobs_num=2)
        if not request.body.get("return_logprob")
        else request.send(client)
        for request in requests
    ]


def ask(client: Client, requests: Sequence[Request], concurrency: int) -> list[Any]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda request: request.send(client), requests))


def assert_alike(requests: Sequence[Request], oracle: Sequence[Any], answers: Sequence[Any]) -> None:
    """Fails where ids, text, end, logprobs or hidden states differ; a tie is excused, once."""
    ties = 0
    for request, expected, answer in zip(requests, oracle, answers, strict=True):
        one_by_one = zip(expected, answer, strict=True) if isinstance(expected, list) else [(expected, answer)]
        for want, got in one_by_one:
            ties += _compare(request, want, got)
    assert ties <= 1, f"{ties} ties"


def _compare(request: Request, want: Any, got: Any) -> bool:
    if "output_ids" not in want:
        assert want["type"] == got["type"] and "Tokens not accepted" in want["message"], (request, want, got)
        return False
    assert "output_ids" in got, (request, got)
    if want["output_ids"] != got["output_ids"]:
        pairs = zip(want["output_ids"], got["output_ids"], strict=False)
        shorter = min(len(want["output_ids"]), len(got["output_ids"]))
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        tops = want["meta_info"].get("output_top_logprobs") or [None] * (index + 1)
        best = tops[index] if index < len(tops) else None
        gap = best[0][0] - best[1][0] if best and len(best) > 1 else float("inf")
        assert gap < TIES.tie_gap, f"{request}: token {index} differs, gap {gap}: {want['text']!r}, {got['text']!r}"
        return True
    expected, meta = want["meta_info"], got["meta_info"]
    assert want["text"] == got["text"], request
    for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
        assert expected[name] == meta[name], (request, name, expected[name], meta[name])
    assert ("output_token_sampling_mask" in meta) == bool(request.body.get("return_sampling_mask")), request
    for name in (
        "input_token_logprobs",
        "output_token_logprobs",
        "input_top_logprobs",
        "output_top_logprobs",
        "output_token_ids_logprobs",
        "hidden_states",
        "output_token_sampling_mask",
        "output_token_sampling_logprobs",
    ):
        if name in meta:
            assert_close(expected[name], meta[name], f"{request}: {name}")
    return False


def assert_close(want: Any, got: Any, what: str) -> None:
    if isinstance(want, list) and isinstance(got, list):
        assert len(want) == len(got), f"{what}: {len(want)} and {len(got)} entries"
        for a, b in zip(want, got, strict=True):
            assert_close(a, b, what)
    elif isinstance(want, dict) and isinstance(got, dict):
        assert want.keys() == got.keys(), f"{what}: {want.keys()} and {got.keys()}"
        for key in want:
            assert_close(want[key], got[key], f"{what}/{key}")
    elif isinstance(want, float) and isinstance(got, float):
        assert abs(want - got) <= LOGPROB_TOLERANCE * max(1.0, abs(want)), f"{what}: {want} and {got}"
    else:
        assert want == got, f"{what}: {want} and {got}"


def mean_commit_len(answers: Sequence[Any]) -> float:
    flat = [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]
    metas = [answer["meta_info"] for answer in flat if "meta_info" in answer]
    steps = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    histograms = [meta.get("spec_correct_drafts_histogram", []) for meta in metas]
    accepted = sum(n * count for histogram in histograms for n, count in enumerate(histogram))
    return 1 + accepted / max(1, steps)


def draw(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """`count` values, the same in every run; the test's name and output show the seed."""
    drawn: list[Any] = []

    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(strategy)
    def collect(value: Any) -> None:
        drawn.append(value)

    collect()
    print(f"{len(drawn)} combinations, hypothesis seed {SEED}")
    return drawn[:count]


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def combinations() -> st.SearchStrategy[dict[str, Any]]:
    """Sampling parameters in any combination that the host allows (at most one grammar)."""
    grammar = st.sampled_from([GREEDY[name] for name in ("json_schema", "regex", "ebnf", "structural_tag")])
    numbers = {
        "frequency_penalty": st.floats(-2, 2, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "repetition_penalty": st.floats(0.5, 2, width=32),
        "min_new_tokens": st.integers(0, MAX_NEW_TOKENS),
        "logit_bias": st.dictionaries(st.integers(3, 900).map(str), st.floats(-20, 20, width=32), max_size=6),
        "stop": st.lists(st.sampled_from(["is", " the", "=", "\n", "12", "a"]), max_size=3),
        "stop_token_ids": st.lists(st.sampled_from([11, 13, 198, 220]), max_size=2),
        "stop_regex": st.lists(st.sampled_from(["[0-9]{2}", "[a-z] [a-z]", "\\.$"]), max_size=2),
        "top_k": st.integers(1, 50),
        "top_p": st.floats(0.25, 1, width=32),
        "min_p": st.floats(0, 0.25, width=32),
        "ignore_eos": st.booleans(),
        "no_stop_trim": st.booleans(),
        "skip_special_tokens": st.booleans(),
    }
    options = st.fixed_dictionaries({name: _maybe(values) for name, values in numbers.items()})

    def merge(values: dict[str, Any], grammar: dict[str, Any] | None) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value is not None} | (grammar or {})

    return st.builds(merge, options, _maybe(grammar))


PROCESSOR = """
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class NoRecentToken(CustomLogitProcessor):
    def __call__(self, logits, params):
        for row, param in enumerate(params):
            if param:
                for token in list(param["__req__"].output_ids)[-param["window"]:]:
                    logits[row, token] = -float("inf")
        return logits

print(NoRecentToken.to_str())
"""


def processor_body() -> dict[str, Any]:
    """A custom logit processor that reads the request's output ids, made in a script as users do."""
    made = subprocess.run([sys.executable, "-c", PROCESSOR], capture_output=True, text=True, check=True)
    return {"custom_logit_processor": made.stdout.strip().splitlines()[-1]}


def requests_of(
    cases: dict[str, dict[str, Any]], prompts: Sequence[list[int]], make: Callable[..., Request] = Request
) -> list[Request]:
    return [make(name, prompt, sampling) for name, sampling in cases.items() for prompt in prompts]

"""No request ends the server: a seeded part of `scripts/fuzz.sh --fields`, and requests that it once ended with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from arms import PLAIN, POOL, SPECULATE, Baseline, on_arms
from test_lifecycle import assert_pool_empties

from equality import assert_equal_tokens
from fuzz.fields import fuzz_fields
from preloaded import PreloadedServer
from sglang_dflash.serving import TINY_OVERLAPPING, Client

pytestmark = pytest.mark.server
REQUESTS, SEED = 900, 20261122

_OLLAMA = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
# These ended SGLang 0.5.23, with speculation on or off, or were HTTP 500: path, body, words of the answer.
DEADLY: list[tuple[str, dict[str, Any], str]] = [  # those of /generate get the missing fields
    ("/generate", {"return_logprob": True, "logprob_start_len": -7}, "logprob_start_len is -7"),
    ("/generate", {"return_logprob": True, "top_logprobs_num": 1000000}, "top_logprobs_num is 1000000"),
    ("/generate", {"return_hidden_states": []}, "could not be taken in"),
    ("/generate", {"positional_embed_overrides": {"1": 1e308}}, "positional_embed_overrides is not served"),
    ("/generate", {"sampling_params": {"temperature": 1.0, "logit_bias": {"1": 1e308}}}, "logit_bias of token 1 is"),
    (
        "/generate",
        {"sampling_params": {"temperature": 1.0, "repetition_penalty": 1e-300}},
        "repetition_penalty is 1e-300",
    ),
    ("/generate", {"sampling_params": {"temperature": 1e308, "regex": "[0-9]+"}}, "temperature is 1e+308"),
    ("/generate", {"sampling_params": {"n": 2147483647}}, "n is 2147483647 for 1 prompts"),
    ("/generate", {"input_ids": None, "text": ""}, "The prompt (text) is empty"),
    ("/generate", {"input_ids": None, "text": ["a", ""]}, "The prompt (text) is empty"),
    ("/generate", {"input_ids": [[5, 6, 7], []]}, "The prompt (input_ids) is empty"),
    ("/v1/completions", {"model": "m", "prompt": ["a", ""]}, "The prompt (text) is empty"),
    ("/v1/completions", {"model": "m", "prompt": [[5], []]}, "The prompt (input_ids) is empty"),
    ("/api/chat", {"model": "m", "messages": []}, "The prompt (messages) is empty"),
    ("/api/chat", {**_OLLAMA, "stream": True, "options": {"num_predict": 4000}}, "maximum context length"),
    ("/api/chat", {**_OLLAMA, "stream": False, "options": {"num_predict": 4000}}, "maximum context length"),
    ("/update_weights_from_disk", {"model_path": "/nowhere", "load_format": "root"}, "load_format is 'root'"),
]


@pytest.mark.parametrize(("path", "fields", "named"), DEADLY, ids=[named for *_, named in DEADLY])
@on_arms("default")
def test_a_deadly_request_is_refused(
    client: Client, baseline: Baseline, path: str, fields: dict[str, Any], named: str
) -> None:
    """Fails where the request is not a 400 with a sentence, or the server does not answer the next one as before."""
    prompt, expected = baseline.prompts[0], baseline.answers[0]
    client.generate(prompt, max_new_tokens=4)  # some were deadly only where the prompt is cached
    body = {"input_ids": prompt, **fields} if path == "/generate" else fields
    response = client.post(path, body)
    assert response.status_code == 400 and named in json.dumps(response.json()), response.text
    assert_equal_tokens([client.generate(prompt, max_new_tokens=160)], [expected], [prompt])


@on_arms("default")
def test_no_slot_is_lost_to_refusals(client: Client) -> None:
    """Fails where a refused request keeps KV slots. Runs after the requests above."""
    assert_pool_empties(client)


def test_extremes_of_every_field(tmp_path: Path) -> None:
    """Fails where a request ends the server, changes what it answers to others, or keeps a KV slot."""
    servers = iter(range(1000))

    def start() -> PreloadedServer:
        arguments = [*PLAIN, *POOL, *SPECULATE, "--log-level", "warning"]
        return PreloadedServer(arguments, tmp_path / f"{next(servers)}.log", TINY_OVERLAPPING).start()

    findings = fuzz_fields(start, REQUESTS, SEED)
    assert not findings.complaints, "\n".join(findings.complaints)
    assert sum(findings.statuses.values()) == REQUESTS
    answered = sum(count for status, count in findings.statuses.items() if status.endswith(" 200"))
    assert answered > REQUESTS / 5, findings.statuses  # else it knocks at closed doors only

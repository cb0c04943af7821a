"""A request that the worker cannot honour gets a 400 with a sentence, and no other request is affected."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from arms import MAX_NEW_TOKENS, Baseline, on_arms

from equality import assert_equal_tokens
from sglang_dflash.serving import Client

pytestmark = pytest.mark.server

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"beam_width": 3}, {}, "Beam"),
    ({"watermark": {"enabled": True, "key": "k"}}, {}, "watermark"),
    ({"top_k": 5000, "temperature": 1.0}, {"return_sampling_mask": True}, "return_sampling_mask"),
    ({"frequency_penalty": 2.5}, {}, "frequency_penalty"),
    ({"min_new_tokens": 500}, {}, "min_new_tokens"),
    ({"temperature": -1.0}, {}, "temperature"),
    ({"stop_token_ids": [1000000], "min_new_tokens": 5}, {}, "stop_token_ids has 1000000"),
    ({"regex": "[0-9]+", "json_schema": "{}"}, {}, "regex"),
    ({"regex": "("}, {}, "regex"),
    ({"json_schema": "{"}, {}, "json"),
    ({"logit_bias": {"1000000": 1.0}}, {}, "logit_bias"),
    ({}, {"video_data": ["data:video/mp4;base64,AAAA"]}, "Videos (video_data"),
    ({}, {"audio_data": "data:audio/wav;base64,AAAA"}, "Audio (audio_data"),
    ({}, {"return_logprob": True, "token_ids_logprob": [1000000]}, "token_ids_logprob"),
    ({"max_new_tokens": 0}, {"token_indices_to_pool": [1]}, "token_indices_to_pool"),
    ({"max_new_tokens": 0}, {"multi_item_delimiter_indices": [1]}, "multi_item_delimiter_indices"),
]


def body(prompt: list[int], sampling: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS, **sampling}
    return {"input_ids": prompt, "sampling_params": params, **extra}


@pytest.mark.parametrize(("sampling", "extra", "named"), REFUSED, ids=[named for *_, named in REFUSED])
@on_arms("default")
def test_unserved_parameter_is_a_400(
    client: Client, baseline: Baseline, sampling: dict[str, Any], extra: dict[str, Any], named: str
) -> None:
    """Fails where the parameter is ignored, or the sentence does not name it and its value."""
    response = client.post("/generate", body(baseline.prompts[0], sampling, extra))
    assert response.status_code == 400, response.text
    assert named in json.dumps(response.json())


@on_arms("default")
def test_ids_outside_the_vocabulary(client: Client) -> None:
    """Fails where a token id that does not exist does not give a 400, or ends the server."""
    response = client.post("/generate", body([5, 10**6], {}, {}))
    assert response.status_code == 400 and "1000000" in response.text
    assert client.generate("Hello", max_new_tokens=2).ids


@on_arms("default")
def test_openai_endpoint_refuses_too(client: Client) -> None:
    """Fails where the chat endpoint answers, or a stream ends without the error event."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
    refused = client.post("/v1/chat/completions", {**chat, "watermark": {"enabled": True, "key": "k"}})
    assert refused.status_code == 400 and "watermark" in refused.json()["message"]
    streamed = client.post(
        "/v1/chat/completions", {**chat, "stop_token_ids": [1000000], "min_tokens": 5, "stream": True}
    )
    assert "stop_token_ids has 1000000" in streamed.text and '"error"' in streamed.text
    assert client.post("/v1/chat/completions", {**chat, "presence_penalty": 3.0}).status_code == 400
    assert client.post("/v1/chat/completions", chat).status_code == 200


@on_arms("default")
def test_refusals_do_not_touch_other_requests(client: Client, baseline: Baseline) -> None:
    """Fails where a refused request, sharing a batch with others, changes one of their tokens."""
    prompts, expected = baseline.prompts[::2], baseline.answers[::2]
    with ThreadPoolExecutor(4) as pool:
        refusals = [
            pool.submit(client.post, "/generate", body(baseline.prompts[i], *REFUSED[i % len(REFUSED)][:2]))
            for i in range(40)
        ]
        answers = client.generate_all(prompts, 6, max_new_tokens=MAX_NEW_TOKENS)
    assert all(refusal.result().status_code == 400 for refusal in refusals)
    assert_equal_tokens(answers, expected, prompts)

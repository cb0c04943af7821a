"""Requests that are served, and those that are refused with a sentence: no parameter is silently ignored."""

from __future__ import annotations

import dataclasses
import re
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.host.requests import refuse_unsupported

README = Path(__file__).parents[2] / "README.md"

# Fields that the host makes for itself; no client sends them.
INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}


class _Tokenizer:
    """Enough for `SamplingParams.normalize`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def _request(sampling: dict[str, Any] | None = None, **fields: Any) -> SimpleNamespace:
    """A request as the scheduler checks it: greedy unless told otherwise."""
    params = SamplingParams(**{"temperature": 0.0, **(sampling or {})})
    params.normalize(_Tokenizer())
    plain = {
        "return_logprob": False,
        "return_hidden_states": False,
        "custom_logit_processor": None,
        "return_sampling_mask": False,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "origin_input_ids": array("q", [0, 99]),
        "multimodal_inputs": None,
        "vocab_size": 100,
    }
    return SimpleNamespace(sampling_params=params, **{**plain, **fields})


def _fields(request: type) -> set[str]:
    if dataclasses.is_dataclass(request):
        return {field.name for field in dataclasses.fields(request)}
    if hasattr(request, "__struct_fields__"):
        return set(request.__struct_fields__)
    return set(request.model_fields)


@pytest.mark.parametrize("request_type", [SamplingParams, GenerateReqInput, CompletionRequest, ChatCompletionRequest])
def test_readme_names_every_field(request_type: type) -> None:
    """Fails where SGLang has a field of which the README's table does not say what becomes of it."""
    section = README.read_text().split("## Every field of a request")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    missing = {name for name in _fields(request_type) - INTERNAL if not name.startswith("_")} - named
    assert not missing


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"stop": ["\n\n", "END"], "max_new_tokens": 7, "ignore_eos": True},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "sampling_seed": 5},
        {"frequency_penalty": -0.5, "presence_penalty": 0.25, "repetition_penalty": 1.1, "min_new_tokens": 5},
        {"json_schema": '{"type": "object"}'},
        {"logit_bias": {"17": -100.0}},
        {"n": 2},
        {"max_new_tokens": 0},
        {"stop_token_ids": [100]},
        {"beam_width": 1},
        {"watermark": {"enabled": False}},
    ],
    ids=[
        "plain",
        "stops",
        "sampled",
        "penalties",
        "grammar",
        "bias",
        "n",
        "prefill-only",
        "stray stop",
        "one beam",
        "no watermark",
    ],
)
def test_served_requests_are_left_as_they_are(sampling: dict[str, Any]) -> None:
    """Fails where a request that is honoured in full is refused, or changed."""
    request = _request(sampling, return_logprob=True, return_hidden_states=True, custom_logit_processor="{}")
    before = msgspec.structs.asdict(request.sampling_params)
    assert refuse_unsupported(request) is None
    assert msgspec.structs.asdict(request.sampling_params) == before
    assert request.return_hidden_states and request.custom_logit_processor


@pytest.mark.parametrize(
    ("sampling", "fields", "named"),
    [
        ({"beam_width": 4}, {}, "beam_width=4"),
        ({"watermark": {"enabled": True}}, {}, "watermark"),
        ({"watermark": {"key": "ab"}}, {}, "watermark"),
        ({"stop_token_ids": [5, 100], "min_new_tokens": 3}, {}, "stop_token_ids has 100"),
        ({"stop_token_ids": [-7], "min_new_tokens": 3}, {}, "stop_token_ids has -7"),
        ({}, {"return_sampling_mask": True}, "return_sampling_mask=True"),
        ({}, {"input_embeds": [[0.0, 1.0]]}, "input_embeds"),
        ({}, {"positional_embed_overrides": object()}, "embedding overrides"),
    ],
)
def test_what_is_not_served_is_refused(sampling: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    """Fails where it would be ignored, the sentence does not name it, or the request still asks for it on its way out,
    through a prefill that it shares with others."""
    request = _request({**sampling, "logit_bias": {"17": -100.0}, "stop": "x"}, **fields)
    sentence = refuse_unsupported(request)
    assert sentence is not None
    assert sentence.startswith("DFLASH speculative decoding does not serve this request: ") and sentence.endswith(".")
    assert named in sentence
    params = request.sampling_params
    assert (params.max_new_tokens, params.top_k, params.stop_strs, params.logit_bias) == (1, 1, [], None)
    assert params.is_normalized and params.beam_width is None and params.watermark is None
    assert not request.return_sampling_mask
    assert request.input_embeds is None and request.positional_embed_overrides is None
    assert refuse_unsupported(request) is None


@pytest.mark.parametrize("outside", [-1, 100, 10**6])
def test_ids_outside_the_vocabulary_are_refused(outside: int) -> None:
    """Fails where such an id reaches the embedding, which would end the scheduler."""
    sentence = refuse_unsupported(_request(origin_input_ids=array("q", [5, outside, 7])))
    assert sentence is not None
    assert f"input_ids has {outside}" in sentence
    assert "0 to 99" in sentence
    assert refuse_unsupported(_request(origin_input_ids=array("q", [outside]), multimodal_inputs=object())) is None

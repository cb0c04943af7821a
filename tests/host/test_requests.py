"""Requests that are served, and those that are refused with a sentence: no parameter is silently ignored."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.host.requests import NEUTRAL, refuse_unsupported

# Sampling parameter -> a value that a client may send and that asks for something.
ASKING: dict[str, Any] = {
    "frequency_penalty": -0.5,
    "presence_penalty": 0.25,
    "repetition_penalty": 1.1,
    "min_new_tokens": 5,
    "json_schema": '{"type": "object"}',
    "regex": "[0-9]+",
    "ebnf": 'root ::= "a"',
    "structural_tag": '{"structures": []}',
    "logit_bias": {"17": -100.0},
    "beam_width": 4,
    "watermark": {"enabled": True},
}

# Parameters of which speculation needs to know nothing, with why.
HONOURED_ELSEWHERE = {
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "ignore_eos"),  # the scheduler cuts committed ids
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"),  # the text
    *("temperature", "top_k"),  # checked together: greedy or refused
    *("top_p", "min_p", "sampling_seed"),  # mean nothing once greedy
    "n",  # becomes n requests
    "custom_params",  # read by logit processors and by grammars, both refused
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),  # the host's own
    "ebnf_full_assistant",  # a flag of ebnf
}


class _Tokenizer:
    """Enough for `SamplingParams.normalize`."""

    additional_stop_token_ids = None
    eos_token_id = 0

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


def test_every_sampling_parameter_is_accounted_for():
    """Fails where SGLang has a parameter that we neither refuse nor know to be harmless."""
    fields = set(SamplingParams.__struct_fields__)
    assert fields == set(NEUTRAL) | HONOURED_ELSEWHERE
    assert not set(NEUTRAL) & HONOURED_ELSEWHERE
    assert set(ASKING) == set(NEUTRAL), "a refused parameter is not tested below"


def test_neutral_values_are_the_hosts_defaults():
    """Fails where a client that sends nothing would be refused, or a default that asks for something passes."""
    defaults = SamplingParams()
    assert {name: getattr(defaults, name) for name in NEUTRAL} == NEUTRAL


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"stop": ["\n\n", "END"], "max_new_tokens": 7, "ignore_eos": True},
        {"stop_token_ids": [3, 4], "stop_regex": "a+b", "no_stop_trim": True, "skip_special_tokens": False},
        {"temperature": 0.7, "top_k": 1},
        {"top_p": 0.9, "min_p": 0.1, "sampling_seed": 5},
        {"n": 2},
        {"max_new_tokens": 0},
        dict(NEUTRAL),
        dict.fromkeys(NEUTRAL),
        {"json_schema": "", "regex": "", "logit_bias": {}},
    ],
    ids=["plain", "stops", "text", "top-k-1", "moot", "n", "prefill-only", "neutral", "null", "empty"],
)
def test_greedy_requests_are_served_as_they_are(sampling):
    """Fails where a request that greedy decoding honours in full is refused, or changed."""
    request = _request(sampling)
    before = msgspec.structs.asdict(request.sampling_params)
    assert refuse_unsupported(request) is None
    assert msgspec.structs.asdict(request.sampling_params) == before


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_parameter_that_is_not_served_is_refused(name):
    """Fails where the parameter would be ignored, or the sentence names neither it nor its value."""
    request = _request({name: ASKING[name]})
    value = getattr(request.sampling_params, name)
    sentence = refuse_unsupported(request)
    assert sentence is not None
    assert f"{name}={value!r}" in sentence
    assert f"leave it at {NEUTRAL[name]!r}" in sentence


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 1e-5},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.5, "top_p": 0.01},
    ],
)
def test_sampling_is_refused(sampling):
    """Fails where a request that samples is answered greedily."""
    sentence = refuse_unsupported(_request(sampling))
    assert sentence is not None
    assert f"temperature={sampling['temperature']}" in sentence
    assert "temperature=0 (greedy)" in sentence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_logprob", True),
        ("return_hidden_states", True),
        ("return_hidden_states", "last"),
        ("custom_logit_processor", '{"callable": "00"}'),
        ("return_sampling_mask", True),
        ("input_embeds", [[0.0, 1.0]]),
    ],
)
def test_a_wish_beside_the_parameters_is_refused(field, value):
    """Fails where the answer would lack what the request asked for, or the sentence does not name it."""
    sentence = refuse_unsupported(_request(**{field: value}))
    assert sentence is not None
    assert field in sentence
    assert "leave" in sentence or "send" in sentence


@pytest.mark.parametrize("outside", [-1, 100, 10**6])
def test_ids_outside_the_vocabulary_are_refused(outside):
    """Fails where such an id reaches the embedding, which would end the scheduler."""
    sentence = refuse_unsupported(_request(origin_input_ids=array("q", [5, outside, 7])))
    assert sentence is not None
    assert f"input_ids has {outside}" in sentence
    assert "0 to 99" in sentence
    assert refuse_unsupported(_request(origin_input_ids=array("q", [outside]), multimodal_inputs=object())) is None


def test_a_refused_request_is_harmless_on_its_way_out():
    """Fails where what was refused still reaches the one-token prefill that the request shares with others."""
    request = _request(
        {"logit_bias": {"17": -100.0}, "min_new_tokens": 5, "stop": "x"},
        return_hidden_states=True,
        custom_logit_processor="{}",
    )
    assert refuse_unsupported(request) is not None
    params = request.sampling_params
    assert (params.max_new_tokens, params.top_k, params.stop_strs) == (1, 1, [])
    assert params.is_normalized
    assert {name: getattr(params, name) for name in NEUTRAL} == NEUTRAL
    assert not request.return_hidden_states
    assert request.custom_logit_processor is None
    assert refuse_unsupported(request) is None


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("input_embeds", [[0.0, 1.0]], None),  # the host would take them for the embeddings of the whole batch
        ("positional_embed_overrides", object(), None),
        ("return_sampling_mask", True, False),
    ],
)
def test_a_refused_wish_is_taken_back(field, value, harmless):
    """Fails where the request, cut to one token, still carries its wish into a prefill that it shares."""
    request = _request(**{field: value})
    assert refuse_unsupported(request) is not None
    assert getattr(request, field) == harmless


def test_the_sentence_says_who_refuses():
    """Fails where the client cannot tell that speculation, not the model, is in the way."""
    sentence = refuse_unsupported(_request({"temperature": 0.7}))
    assert sentence.startswith("DFLASH speculative decoding does not serve this request: ")
    assert sentence.endswith(".")

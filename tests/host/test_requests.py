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

from sglang_cpu.hooking import hooks_of
from sglang_dflash.host.start import requests
from sglang_dflash.host.start.requests import refuse_unsupported

VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
PAGE = Path(__file__).parents[2] / "docs" / "request-fields.md"

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
        "multi_item_delimiter_indices": None,
        "token_indices_to_pool": None,
        "session": None,
        "origin_input_ids": array("q", [0, 99]),
        "origin_input_ids_unpadded": array("q", [0, 99]),
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
def test_the_page_names_every_field(request_type: type) -> None:
    """Fails where SGLang has a field of which the table does not say what becomes of it."""
    section = PAGE.read_text().split("## Every field of a request")[1].split("\n## ")[0]
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
    sentence = refuse_unsupported(_request(origin_input_ids_unpadded=array("q", [5, outside, 7])))
    assert sentence is not None
    assert f"input_ids has {outside}" in sentence
    assert "0 to 99" in sentence
    assert "input_ids has" in refuse_unsupported(
        _request(origin_input_ids_unpadded=array("q", [outside]), multimodal_inputs=object())
    )
    padded = _request(origin_input_ids=array("q", [outside]), multimodal_inputs=object())
    assert refuse_unsupported(padded) is None, "what stands for an image is the host's"


@pytest.fixture(params=["DFLASH", None])
def serving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether DFLASH serves in this process."""
    monkeypatch.setattr(requests, "serves_dflash", lambda: request.param == "DFLASH")
    return request.param == "DFLASH"


def _hook(hook: Any) -> Any:
    """Our hook around a method of the host that finds nothing wrong."""
    return lambda *arguments: hook(lambda *_: None, *arguments)


def _refused_while_serving(serving: bool, named: str, check: Any, *arguments: Any) -> None:
    if serving:
        with pytest.raises(ValueError, match=re.escape(named)):
            check(*arguments)
    else:
        check(*arguments)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"return_logprob": True, "logprob_start_len": -7}, "logprob_start_len is -7; allowed: -1, or 0 and more."),
        ({"return_logprob": True, "logprob_start_len": "a"}, "logprob_start_len is 'a'"),
        ({"return_logprob": True, "top_logprobs_num": 1000000}, "top_logprobs_num is 1000000; allowed: 0 to 100."),
        ({"top_logprobs_num": -1}, "top_logprobs_num is -1"),
        ({"top_logprobs_num": [5]}, "top_logprobs_num is [5]"),
        ({"positional_embed_overrides": {"1": 2}}, "positional_embed_overrides is not served"),
    ],
)
def test_what_would_end_the_scheduler_stops_at_the_tokenizer(serving: bool, fields: Any, named: str) -> None:
    """Fails where a value passes that ends the scheduler, or where it is refused although DFLASH does not serve."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    check = _hook(requests._validate_in_tokenizer)
    _refused_while_serving(serving, named, check, manager, GenerateReqInput(text="Hi", **fields), [5])


def test_an_empty_prompt_is_refused_in_the_scheduler() -> None:
    """Fails where a prompt that only the scheduler knows to be empty is served."""
    assert "its prompt is empty" in (refuse_unsupported(_request(origin_input_ids_unpadded=array("q", []))) or "")


@pytest.mark.parametrize("more", [{}, {"session_params": {"id": None}}, {"session_params": {"rid": "x"}}])
def test_an_empty_prompt_is_refused_by_any_server(serving: bool, more: dict[str, Any]) -> None:
    """Fails where a prompt without tokens reaches the scheduler, with DFLASH or without."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    hook = hooks_of(requests)[VALIDATE]
    assert hook.always
    for fields, named in (({"text": ""}, "(text)"), ({"input_ids": []}, "(input_ids)")):
        with pytest.raises(ValueError, match=re.escape(f"The prompt {named} is empty")):
            hook.function(lambda *_: None, manager, GenerateReqInput(**fields, **more), [])


@pytest.mark.parametrize("more", [{"session_params": {"id": "x"}}, {"need_wait_for_mm_inputs": True}])
def test_a_prompt_that_the_scheduler_completes_passes(serving: bool, more: dict[str, Any]) -> None:
    """Fails where a session's turn, or a prompt whose ids an encoder makes, is refused."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    hooks_of(requests)[VALIDATE].function(lambda *_: None, manager, GenerateReqInput(text="", **more), None)


def test_ordinary_logprobs_pass_the_tokenizer(serving: bool) -> None:
    """Fails where a value is refused that the host serves."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    check = _hook(requests._validate_in_tokenizer)
    for fields in ({}, {"logprob_start_len": -1}, {"logprob_start_len": 0}, {"top_logprobs_num": 100}):
        check(manager, GenerateReqInput(text="Hi", return_logprob=True, **fields), [5])


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"top_k": 2**31}, "top_k is 2147483648; allowed: at most 1073741824."),
        ({"top_k": float("nan")}, "top_k is nan; allowed: at most 1073741824."),
        ({"min_new_tokens": 2**40, "max_new_tokens": 2**41}, "min_new_tokens is 1099511627776; allowed: at most"),
        ({"temperature": 1e308}, "temperature is 1e+308; allowed: 0 to 1e+30."),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300; allowed: 1e-30 to 2."),
        ({"logit_bias": {"5": 1e308}}, "logit_bias of token 5 is 1e+308; allowed: -1e+30 to 1e+30."),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias of token 5 is nan"),
        ({"logit_bias": {"5": "a"}}, "logit_bias of token 5 is 'a'"),
    ],
)
def test_numbers_that_end_the_scheduler_are_refused(serving: bool, sampling: dict[str, Any], named: str) -> None:
    """Fails where an integer does not fit the host's int32 tensors, or where probabilities become NaN, which ends the
    scheduler as soon as a token is drawn."""
    _refused_while_serving(serving, named, _hook(requests._verify_sampling), SamplingParams(**sampling), 100)


def test_ordinary_biases_pass(serving: bool) -> None:
    """Fails where a bias is refused that users send to ban or to force a token."""
    _hook(requests._verify_sampling)(SamplingParams(temperature=5.0, logit_bias={"5": -1e9, "6": 100}), 100)


@pytest.mark.parametrize(
    ("prompts", "sampling"),
    [("Hi", {"n": 10**6}), ("Hi", {"n": 1e9}), (["Hi"] * 3, {"n": 2000}), (["a", "b"], [{"n": 2}, {"n": 5000}])],
)
def test_too_many_answers_are_refused(serving: bool, prompts: Any, sampling: Any) -> None:
    """Fails where the host would make a million tasks before it checks anything."""
    request = GenerateReqInput(text=prompts, sampling_params=sampling)
    _refused_while_serving(serving, "; allowed: 4096 answers in all.", _hook(requests._normalize), request)


def test_many_answers_and_many_prompts_pass(serving: bool) -> None:
    """Fails where an ordinary batch is refused."""
    _hook(requests._normalize)(GenerateReqInput(text="Hi", sampling_params={"n": 4096}))
    _hook(requests._normalize)(GenerateReqInput(text=["Hi"] * 9000, sampling_params={"temperature": 0}))
    _hook(requests._normalize)(GenerateReqInput(input_ids=[5] * 9000, sampling_params={"n": 2}))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"video_data": "data:video/mp4;base64,AAAA"}, "Videos (video_data, video_url) are not served on a CPU"),
        ({"video_data": [None, ["file.mp4"]]}, "Videos"),
        ({"audio_data": ["file.wav"]}, "Audio (audio_data, audio_url, input_audio) is not served on a CPU"),
    ],
)
@pytest.mark.parametrize("cpu", [True, False])
def test_what_a_cpu_cannot_decode_is_refused(
    serving: bool, data: dict[str, Any], named: str, cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails where a video or audio is silently left out of the prompt, or is refused where an accelerator serves."""
    monkeypatch.setattr(requests, "cpu_platform_in_use", lambda: cpu)
    _refused_while_serving(serving and cpu, named, _hook(requests._normalize), GenerateReqInput(text="Hi", **data))


def test_requests_without_videos_and_audio_pass(serving: bool) -> None:
    """Fails where images, or the empty lists that the chat endpoint sends, are refused."""
    for data in ({}, {"image_data": ["a.png"]}, {"video_data": [], "audio_data": [[], None]}):
        _hook(requests._normalize)(GenerateReqInput(text="Hi", **data))


class _Scheduler:
    """A scheduler that fails to take a request in, and notes what it sends back."""

    def __init__(self, dflash: bool) -> None:
        self.sent: list[Any] = []
        self.spec_algorithm = SimpleNamespace(is_dflash=lambda: dflash)
        self.session_controller = SimpleNamespace(sessions={"s": SimpleNamespace(_inflight=False, req_nodes={})})
        sender = SimpleNamespace(send_output=lambda output, request: self.sent.append(output))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=sender)


@pytest.mark.parametrize("dflash", [True, False])
def test_a_request_that_cannot_be_taken_in_ends_alone(dflash: bool) -> None:
    """Fails where the exception leaves the handler, which ends the scheduler, or the client gets no sentence."""

    def fail(*_: Any) -> None:
        raise TypeError("'dict' is no 'str'")

    hook = requests._handle_in_scheduler
    scheduler, request = _Scheduler(dflash), SimpleNamespace(rid="r", http_worker_ipc=None, session_params=None)
    if not dflash:
        with pytest.raises(TypeError):
            hook(fail, scheduler, request)
        return
    hook(fail, scheduler, request)
    (answer,) = scheduler.sent
    assert answer.rid == "r" and answer.finished_reason["status_code"] == 400
    assert "TypeError: 'dict' is no 'str'" in answer.finished_reason["message"]


def test_a_session_goes_on_after_a_request_that_could_not_be_taken_in() -> None:
    """Fails where the session waits for that request, and answers every later one with an error."""
    scheduler = _Scheduler(True)
    session = scheduler.session_controller.sessions["s"]

    def fail(*_: Any) -> None:
        session._inflight = True
        session.req_nodes["r"] = object()
        raise ValueError("odd")

    hook = requests._handle_in_scheduler
    hook(fail, scheduler, SimpleNamespace(rid="r", http_worker_ipc=None, session_params=SimpleNamespace(id="s")))
    assert not session._inflight and not session.req_nodes and len(scheduler.sent) == 1


def test_a_fault_of_the_machine_still_ends_the_scheduler() -> None:
    """Fails where one rank goes on without a request that the others have."""

    def fail(*_: Any) -> None:
        raise MemoryError

    hook = requests._handle_in_scheduler
    with pytest.raises(MemoryError):
        hook(fail, _Scheduler(True), SimpleNamespace(rid="r", http_worker_ipc=None, session_params=None))

"""Which requests are refused: those that the worker would not honour exactly, and those that would end the server."""

from __future__ import annotations

import logging
from http import HTTPStatus
from numbers import Integral, Real
from typing import Any

from fastapi import HTTPException
from jinja2 import TemplateError
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sglang_cpu.detect import cpu_platform_in_use
from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.start.version import serves_dflash

logger = logging.getLogger(__name__)
MAX_ANSWERS = 4096  # of one HTTP request: SGLang makes a task and a copy of the request for each, before any check
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
LARGEST = 1e30  # of a temperature or a bias: their quotient must fit float32, or probabilities are NaN
UNSEEN_ON_CPU = {
    "video_data": "Videos (video_data, video_url) are",
    "audio_data": "Audio (audio_data, audio_url, input_audio) is",
}


def refuse_unsupported(req: Any) -> str | None:
    """Why the scheduler must refuse `req` (`schedule_batch.Req`), or None.

    A refused request still passes SGLang's one-token prefill on its way out; it does so greedily, so that what
    it asked for touches no other request of that batch.
    """
    complaint = _complaint(req)
    if complaint is None:
        return None
    req.sampling_params = SamplingParams(max_new_tokens=1, temperature=0.0)
    req.sampling_params.normalize(None)
    req.custom_logit_processor = None
    req.return_hidden_states = False
    req.return_sampling_mask = False
    req.multi_item_delimiter_indices = req.token_indices_to_pool = None
    req.input_embeds = None
    req.positional_embed_overrides = None
    return f"DFLASH speculative decoding does not serve this request: {complaint}."


def _complaint(req: Any) -> str | None:
    # SGLang checks no id, and one outside the embedding ends the scheduler. For an image it puts such ids into
    # `origin_input_ids`; what was asked holds image tokens there.
    ids = req.origin_input_ids_unpadded
    if not ids:
        return "its prompt is empty; send one token or more"
    if not 0 <= min(ids) <= max(ids) < req.vocab_size:
        outside = next(token for token in ids if not 0 <= token < req.vocab_size)
        return f"input_ids has {outside}, and the model's token ids are 0 to {req.vocab_size - 1}"
    params = req.sampling_params
    stray = next((token for token in params.stop_token_ids or () if not 0 <= token < req.vocab_size), None)
    if stray is not None and params.min_new_tokens:  # SGLang would mask it, which ends the scheduler
        return f"stop_token_ids has {stray} beside min_new_tokens, and token ids are 0 to {req.vocab_size - 1}"
    beam_width = params.beam_width
    if beam_width is not None and beam_width > 1:
        return f"beam_width={beam_width} is not served; leave it out, or send 1"
    if params.watermark is not None and params.watermark.enabled is not False:
        return "watermark is not served; leave it out"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "input_embeds and embedding overrides are not served; send text or input_ids"
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        if getattr(req, name) is not None:  # SGLang returns no hidden states then, and the draft needs them
            return f"{name} is not served; score the items one by one"
    if req.session is not None and req.session.streaming and req.return_hidden_states == "last":
        return "return_hidden_states='last' is not served in a streaming session; send true, or use another session"
    return None


@hook(
    "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
    AROUND,
    why="`n` of a million makes a million tasks before any check",
    until="SGLang bounds `n`",
)
def _normalize(original: Any, request: Any) -> None:
    """Refuses more answers than a server can make tasks for, and on a CPU videos and audio.

    SGLang drops them silently where the model has no place for them. Its video decoder wants FFmpeg, and pins the
    frames for an accelerator.

    Raises:
        ValueError: SGLang answers it with HTTP 400.
    """
    if serves_dflash():
        if cpu_platform_in_use():
            for name, words in UNSEEN_ON_CPU.items():
                if _holds_any(getattr(request, name)):
                    raise ValueError(f"{words} not served on a CPU; send text and images.")
        parameters = request.sampling_params
        prompts = request.text if request.text is not None else request.input_ids
        batch = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        for one in parameters if isinstance(parameters, list) else [parameters]:
            answers: Any = one.get("n") if isinstance(one, dict) else None
            if _is(Real, answers) and answers > 1 and answers * batch > MAX_ANSWERS:
                raise ValueError(f"n is {answers} for {batch} prompts; allowed: {MAX_ANSWERS} answers in all.")
    original(request)


def _holds_any(data: Any) -> bool:
    return any(map(_holds_any, data)) if isinstance(data, list) else data is not None


@hook(
    "sglang.srt.sampling.sampling_params.SamplingParams.verify",
    AROUND,
    why="numbers that are infinite in float32 make NaN, and the scheduler ends",
    until="SGLang checks them",
)
def _verify_sampling(original: Any, params: SamplingParams, vocab_size: int) -> None:
    """Refuses numbers that end the scheduler: integers beyond 32 bits, which SGLang cannot store, and numbers that
    are infinite or 0 in float32, as then probabilities are NaN.

    Raises:
        ValueError: SGLang answers it with HTTP 400.
    """
    original(params, vocab_size)
    if not serves_dflash():
        return
    for name in ("top_k", "min_new_tokens"):
        if not (value := getattr(params, name)) <= TOP_K_ALL:  # also where it is NaN
            raise ValueError(f"{name} is {value}; allowed: at most {TOP_K_ALL}.")
    if params.temperature > LARGEST:
        raise ValueError(f"temperature is {params.temperature}; allowed: 0 to {LARGEST:g}.")
    if params.repetition_penalty < 1 / LARGEST:
        raise ValueError(f"repetition_penalty is {params.repetition_penalty}; allowed: {1 / LARGEST:g} to 2.")
    for token, bias in (params.logit_bias or {}).items():
        if not _is(Real, bias) or not abs(bias) <= LARGEST:
            raise ValueError(f"logit_bias of token {token} is {bias!r}; allowed: {-LARGEST:g} to {LARGEST:g}.")


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
    AROUND,
    why="values that end the scheduler pass SGLang's checks; an empty prompt ends it with any worker",
    until="SGLang checks them",
    always=True,
)
def _validate_in_tokenizer(original: Any, manager: Any, request: Any, input_ids: Any) -> None:
    """Checks what SGLang does not: these values end the scheduler.

    Raises:
        ValueError: SGLang answers it with HTTP 400.
    """
    original(manager, request, input_ids)
    if not isinstance(request, GenerateReqInput):
        return
    # A session adds its history in the scheduler, which checks the length there; so does an encoder on its own.
    session = request.session_params
    in_session = isinstance(session, dict) and session.get("id") is not None
    if not (input_ids or request.input_embeds or in_session or request.need_wait_for_mm_inputs):
        field = "text" if request.text is not None else "input_ids"
        raise ValueError(f"The prompt ({field}) is empty: it has no tokens. Allowed: one token or more.")
    if not serves_dflash():
        return
    vocab_size = manager.model_config.vocab_size
    alternatives, start = request.top_logprobs_num, request.logprob_start_len
    # Checked without return_logprob, too: a batch takes the maximum of its requests.
    if alternatives is not None and not (_is(Integral, alternatives) and 0 <= alternatives <= vocab_size):
        raise ValueError(f"top_logprobs_num is {alternatives!r}; allowed: 0 to {vocab_size}.")
    if request.positional_embed_overrides is not None:
        raise ValueError("positional_embed_overrides is not served; send text or input_ids.")
    if request.return_logprob and start is not None and not (_is(Integral, start) and start >= -1):
        raise ValueError(f"logprob_start_len is {start!r}; allowed: -1, or 0 and more.")


@hook(
    "sglang.srt.entrypoints.ollama.serving.OllamaServing.handle_chat",
    AROUND,
    why="a refused request is answered with HTTP 500",
    until="SGLang answers with HTTP 400",
    always=True,
)
@hook(
    "sglang.srt.entrypoints.ollama.serving.OllamaServing.handle_generate",
    AROUND,
    why="a refused request is answered with HTTP 500",
    until="SGLang answers with HTTP 400",
    always=True,
)
async def refuse_as_ollama(original: Any, serving: Any, request: Any, raw_request: Any) -> Any:
    """Answers a refused request with HTTP 400, as the other endpoints do.

    Raises:
        HTTPException: status 400 and the reason.
    """
    if getattr(request, "messages", None) == []:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "The prompt (messages) is empty. Allowed: one message or more.")
    try:
        return await original(serving, request, raw_request)
    except (ValueError, TemplateError) as error:  # a chat template refuses messages, too
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None


def _is(kind: type, value: Any) -> bool:
    """`isinstance` for the abstract kinds of numbers, which type checkers take for types without arithmetic."""
    return isinstance(value, kind)


@hook(
    "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    AROUND,
    why="an exception over one request ends the scheduler, and so every request",
    until="SGLang catches it",
)
def _handle_in_scheduler(original: Any, scheduler: Any, request: Any, **more: Any) -> None:
    """Ends a request alone if SGLang fails to take it in. Otherwise the scheduler ends, and every request with it.

    The exceptions of MALFORMED are about the request's values: every rank meets them, and no KV slot is taken yet.
    Others (memory, devices) may concern one rank alone. They still end the scheduler.
    """
    session = request.session_params and scheduler.session_controller.sessions.get(request.session_params.id)
    busy = session is not None and session._inflight
    try:
        original(scheduler, request, **more)
    except MALFORMED as error:
        if not scheduler.spec_algorithm.is_dflash():
            raise
        logger.exception("A request could not be taken in and is refused: rid %s.", request.rid)
        if session is not None:  # it waits for a request that never comes
            session.req_nodes.pop(request.rid, None)
            session._inflight = busy
        message = f"The request could not be taken in: {type(error).__name__}: {error}"
        reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": message}
        scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=request.rid, finished_reason=reason), request)

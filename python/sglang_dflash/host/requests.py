"""Which requests this worker refuses: whatever it would not honour exactly."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

# Sampling parameter -> the value at which it asks for nothing.
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "beam_width": None,
    "watermark": None,
}


def refuse_unsupported(req: Any) -> str | None:
    """Why the scheduler must refuse `req` (`schedule_batch.Req`), or None.

    A refused request still passes the host's one-token prefill on its way out; it does so greedily, so that what
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
    req.input_embeds = None
    req.positional_embed_overrides = None
    return f"DFLASH speculative decoding does not serve this request: {complaint}."


def _complaint(req: Any) -> str | None:
    ids = req.origin_input_ids
    # The host checks no id, and one outside the embedding ends the scheduler. Multimodal inputs pad with such ids.
    if ids and req.multimodal_inputs is None and not 0 <= min(ids) <= max(ids) < req.vocab_size:
        outside = next(token for token in ids if not 0 <= token < req.vocab_size)
        return f"input_ids has {outside}, and the model's token ids are 0 to {req.vocab_size - 1}"
    params = req.sampling_params
    if params.top_k != 1:  # the host turns temperature 0 into top_k 1
        return f"temperature={params.temperature} samples, and only temperature=0 (greedy) is served"
    for name, neutral in NEUTRAL.items():
        value = getattr(params, name)
        if value and value != neutral:
            return f"{name}={value!r} is not served; leave it at {neutral!r}"
    if req.return_logprob:
        return "logprobs are not served; leave logprobs, return_logprob and prompt logprobs out"
    if req.return_hidden_states:
        return "return_hidden_states=True is not served; leave it out"
    if req.custom_logit_processor:
        return "custom_logit_processor is not served; leave it out"
    if req.return_sampling_mask:
        return "return_sampling_mask=True is not served; leave it out"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "input_embeds and embedding overrides are not served; send text or input_ids"
    return None

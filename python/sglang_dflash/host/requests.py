"""Which requests this worker refuses: whatever it would not honour exactly."""

from __future__ import annotations

from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams


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
    stray = next((token for token in params.stop_token_ids or () if not 0 <= token < req.vocab_size), None)
    if stray is not None and params.min_new_tokens:  # the host would mask it, which ends the scheduler
        return f"stop_token_ids has {stray} beside min_new_tokens, and token ids are 0 to {req.vocab_size - 1}"
    beam_width = params.beam_width
    if beam_width is not None and beam_width > 1:
        return f"beam_width={beam_width} is not served; leave it out, or send 1"
    if params.watermark is not None and params.watermark.enabled is not False:
        return "watermark is not served; leave it out"
    if req.return_sampling_mask:
        return "return_sampling_mask=True is not served; leave it out"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "input_embeds and embedding overrides are not served; send text or input_ids"
    return None

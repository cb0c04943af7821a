"""Sessions: the next turn's prompt holds the last answer up to its end, without tokens verified beyond it."""

from __future__ import annotations

from typing import Any

from sglang_cpu.hooking import AROUND, hook
from sglang_dflash.host.start.version import serves_dflash


@hook(
    "sglang.srt.session.session_controller.Session._concat_token_arrays",
    AROUND,
    why="a session's next prompt would hold committed tokens behind a stop",
    until="SGLang cuts them",
)
def _whole_answer(original: Any, last_req: Any, req: Any, session_params: Any) -> Any:
    """A block may commit tokens after a stop token. SGLang cuts them from the answer, but builds a session's next
    prompt from the uncut ids (session_controller.py:184). Streaming sessions cut them themselves."""
    if last_req.finished_len is not None:
        last_req.output_ids = last_req.output_ids[: last_req.finished_len]
    return original(last_req, req, session_params)


@hook(
    "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
    AROUND,
    why="a streaming session would take the slot of an answer's last token for written",
    until="SGLang keeps no more than is committed",
)
def _keep_what_is_committed(original: Any, sessions: Any, req: Any) -> bool:
    """Keeps no more than is committed, so that the next turn computes the KV of the last answer's last token.

    SGLang counts on a step that overlap has begun to write it. Without overlap, or if a prefill is next, no step
    writes it, and the slot may hold the KV of a rejected draft.
    """
    slot = sessions.borrowed_slot(req)
    committed = None if slot is None else slot.kv.kv_committed_len
    kept: bool = original(sessions, req)
    if kept and committed is not None and serves_dflash():
        slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, committed)
    return kept

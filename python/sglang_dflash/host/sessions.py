"""Sessions: the next turn's prompt holds the last answer up to its end, without tokens verified beyond it."""

from __future__ import annotations

from typing import Any

from sglang_dflash.host.hooking import AROUND, hook


@hook(
    "sglang.srt.session.session_controller.Session._concat_token_arrays",
    AROUND,
    why="a session's next prompt would hold committed tokens behind a stop",
    until="SGLang cuts them",
)
def _whole_answer(original: Any, last_req: Any, req: Any, session_params: Any) -> Any:
    """A block may commit tokens after a stop token. The host cuts them from the answer, but builds a session's next
    prompt from the uncut ids (session_controller.py:184). Streaming sessions are not affected."""
    if last_req.finished_len is not None:
        last_req.output_ids = last_req.output_ids[: last_req.finished_len]
    return original(last_req, req, session_params)

"""A plugin of SGLang with which the target answers every request with the text of BY_HEART, and then ends.

A regular expression that only this text matches is put into each request, whatever endpoint it comes from.
"""

from __future__ import annotations

import os
import re
from typing import Any

TEXT = "BY_HEART"


def activate() -> None:
    """Entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", _answer, HookType.BEFORE
    )


def _answer(request: Any) -> None:
    only = {"regex": re.sub(r"([][\\{}()*+?.^$|])", r"\\\1", os.environ[TEXT]), "temperature": 0.0}
    request.sampling_params = {"max_new_tokens": 400, **(request.sampling_params or {}), **only}
    request.require_reasoning = False  # the regular expression is to hold for thoughts, too

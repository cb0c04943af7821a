"""A plugin of SGLang that makes our worker take every width in turn, whatever it brings: answers must not change."""

from __future__ import annotations

import itertools
from typing import Any


def activate() -> None:
    """Entry point: changes the policy before the scheduler's process makes its worker."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker", _take_turns, HookType.BEFORE
    )


def _take_turns(*_: Any) -> None:
    from sglang_dflash.core.width import AdaptiveWidth

    turns = itertools.count()
    AdaptiveWidth._choose = lambda policy, requests: 1 + next(turns) % policy._block_size

"""A plugin of SGLang in which our worker's drafts are the baseline's own answers, wrong at seeded positions.

A random draft is never accepted, so it tests little. A replayed one is accepted up to its next wrong position: every
commit_len occurs, with any target. The file named by REPLAYED_ANSWERS holds the answers; it is read anew when it
changes. `REPLAYED_WIDTHS=every` makes the worker take the widths 1 to K in turn.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from pathlib import Path
from typing import Any

ANSWERS, WIDTHS = "REPLAYED_ANSWERS", "REPLAYED_WIDTHS"
WRONG_PERCENT = 16


def activate() -> None:
    """Entry point: changes the draft before the scheduler's process makes its worker."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker", _replay, HookType.BEFORE)


class Answers:
    """Prompt -> the baseline's answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_ns = 0
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def of(self, prompt: list[int]) -> list[int]:
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._read_ns:
            self._answers = {tuple(p): answer for p, answer in json.loads(self._path.read_text())}
            self._read_ns = changed_ns
        return self._answers.get(tuple(prompt), [])


def drafts_of(prompt: list[int], answer: list[int], position: int, count: int) -> list[int]:
    """The drafts for `count` positions of the whole sequence, from `position` on."""
    drafts = []
    for place in range(position, position + count):
        token = answer[place - len(prompt)] if 0 <= place - len(prompt) < len(answer) else 0
        wrong = zlib.crc32(f"{prompt[:4]} {len(prompt)} {place}".encode()) % 100 < WRONG_PERCENT
        drafts.append(token + 1 if wrong and token > 0 else token)
    return drafts


def _replay(*_: Any) -> None:
    import torch

    from sglang_dflash.core.width import AdaptiveWidth
    from sglang_dflash.host.draft_runner import DraftRunner

    answers = Answers(Path(os.environ[ANSWERS]))
    propose = DraftRunner.propose

    def replayed(runner: Any, block: Any, batch: Any, kv_plan: Any) -> torch.Tensor:
        own = propose(runner, block, batch, kv_plan)  # its KV must be written as always
        drafts = [
            drafts_of(list(req.origin_input_ids), answers.of(list(req.origin_input_ids)), start + 1, own.shape[1])
            for req, start in zip(batch.reqs, block.prefix_lens.tolist(), strict=True)
        ]
        return torch.tensor(drafts, dtype=own.dtype, device=own.device).view(own.shape)

    DraftRunner.propose = replayed
    if os.environ.get(WIDTHS) == "every":
        turns = itertools.count()
        AdaptiveWidth._choose = lambda policy, requests: 1 + next(turns) % policy._block_size

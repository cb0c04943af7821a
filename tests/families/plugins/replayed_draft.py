"""A plugin of SGLang in which our worker's drafts are the baseline's own answers, wrong at seeded positions.

A random draft is never accepted, so it tests little. A replayed one is accepted up to its next wrong position: every
commit_len occurs, with any target. The file named by REPLAYED_ANSWERS holds the answers, and may hold one to all other
prompts; it is read anew when it changes. What the draft reads of the prompt with TAPPED_TOKENS tokens goes to the file
named by REPLAYED_TAPS. REPLAYED_WRONG_PERCENT sets how many drafts are wrong, and tells the policy so.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

ANSWERS = "REPLAYED_ANSWERS"
TAPS = "REPLAYED_TAPS"
TAPPED_TOKENS = 17  # of the first prompt that has so many; a later one has an image
WRONG = "REPLAYED_WRONG_PERCENT"
WRONG_PERCENT = 16.0


def activate() -> None:
    """Entry point: changes the draft before the scheduler's process makes its worker."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.maybe_init_draft_worker", _replay, HookType.BEFORE)


class Answers:
    """Prompt -> the baseline's answer. An image is one token in a prompt that is asked, and many in the server's
    prompt, so prompts are compared without them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_ns = 0
        self._wrong_percent = float(os.environ.get(WRONG, WRONG_PERCENT))
        self._image_token = -1
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._otherwise: list[int] = []

    def read_anew(self) -> None:
        changed_ns = self._path.stat().st_mtime_ns
        if changed_ns != self._read_ns:
            read = json.loads(self._path.read_text())
            self._image_token = read["image_token"]
            self._otherwise = read.get("otherwise", [])
            self._answers = {self._text(prompt): answer for prompt, answer in read["answers"]}
            self._read_ns = changed_ns

    def _text(self, prompt: list[int]) -> tuple[int, ...]:
        return tuple(token for token in prompt if token != self._image_token)

    def drafts_of(self, req: Any, position: int, count: int) -> list[int]:
        """The drafts for `count` positions of the request's whole sequence, from `position` on."""
        text, length = self._text(req.origin_input_ids_unpadded), len(req.origin_input_ids)
        answer = self._answers.get(text, self._otherwise)
        drafts = []
        for place in range(position - length, position - length + count):
            token = answer[place] if 0 <= place < len(answer) else 0
            seed = zlib.crc32(f"{text[:4]} {len(text)} {place}".encode())
            wrong = seed % 100 + seed // 100 % 100 / 100 < self._wrong_percent
            drafts.append((token + 1 if token == 0 else token - 1) if wrong else token)
        return drafts

    def log_probs_like(self, own: Any) -> Any:
        """The draft's own [B, K-1]; where REPLAYED_WRONG_PERCENT is set, what is true of the replayed ones."""
        return own if WRONG not in os.environ else own.new_full(own.shape, math.log1p(-self._wrong_percent / 100))


def _replay(*_: Any) -> None:
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    from sglang_dflash.host.worker.draft_runner import DraftRunner
    from sglang_dflash.host.worker.rows import StepRows
    from sglang_dflash.host.worker.worker import DFlashWorker

    # The host reads them while it is imported, which a preloaded server has behind it.
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
    answers = Answers(Path(os.environ[ANSWERS]))
    begin, propose = StepRows._begin, DraftRunner.propose
    running: dict[int, Any] = {}  # the step's requests by their rows in the slot table

    def begun(rows: Any, batch: Any) -> None:
        running.clear()
        running.update(zip(batch.req_pool_indices.tolist(), batch.reqs, strict=True))
        begin(rows, batch)

    def replayed(runner: Any, block: Any, *rest: Any) -> Any:
        own, log_probs = propose(runner, block, *rest)  # its KV must be written as always
        answers.read_anew()
        asked = zip(block.req_pool_indices.tolist(), block.prefix_lens.tolist(), strict=True)
        drafts = [answers.drafts_of(running[row], start + 1, own.shape[1]) for row, start in asked]
        ids = torch.tensor(drafts, dtype=own.dtype, device=own.device).view(own.shape)
        return ids, None if log_probs is None else answers.log_probs_like(log_probs)

    StepRows._begin, DraftRunner.propose = begun, replayed
    verify = DFlashWorker._verify

    def verified(worker: Any, rows: Any, *rest: Any) -> Any:
        before = rows.positions.clone()
        out = verify(worker, rows, *rest)
        # A replayed draft is accepted with KV at wrong positions, too.
        assert torch.equal(rows.positions, before), "the target's forward has changed the positions of its rows"
        return out

    DFlashWorker._verify = verified
    write_context = DraftRunner.write_context

    def written(runner: Any, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        path = Path(os.environ[TAPS])
        if positions.tolist() == list(range(TAPPED_TOKENS)) and not path.exists():
            torch.save(hidden[:TAPPED_TOKENS].clone(), path)
        write_context(runner, hidden, positions, slots)

    DraftRunner.write_context = written

"""The draft's head over the likeliest ids alone: a copy of their rows of the target's head, exchanged while serving."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_dflash.core.draft_vocab import DraftVocabulary, ids_by_default, read_ids
from sglang_dflash.host.worker.draft_input import upload

logger = logging.getLogger(__name__)
VARIABLE = "SGLANG_DFLASH_DRAFT_VOCAB"
FEWEST_IDS = 64  # also of a rank: more than a selector has candidates
PIECE_BYTES = 1 << 19  # of rows that one step copies: a quarter of a millisecond on a CPU
COUNTED_STEPS = 32  # decode steps whose ids are counted together


@dataclass(frozen=True, slots=True)
class DraftIds:
    """What the variable asks for.

    Fields:
        count: N; None: all ids.
        first: ids of a file, the likeliest first.
    """

    count: int | None
    first: Sequence[int] = ()


def asked(vocab_size: int) -> DraftIds:
    """Reads the variable.

    Raises:
        ValueError: one sentence with its value and what is allowed.
    """
    value = os.environ.get(VARIABLE, "")
    if value in ("", "auto"):
        return DraftIds(ids_by_default(vocab_size))
    if value == "full":
        return DraftIds(None)
    allowed = f"allowed: auto, full, a number from {FEWEST_IDS} to {vocab_size}, or the path of a file of token ids"
    if value.isascii() and value.isdigit():
        if not FEWEST_IDS <= int(value) <= vocab_size:
            raise ValueError(f"{VARIABLE} is {value}; {allowed}.")
        return DraftIds(int(value))
    try:
        first = read_ids(Path(value).read_text(), vocab_size)
    except OSError:
        raise ValueError(f"{VARIABLE} is {value!r}, and there is no such file; {allowed}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{VARIABLE}: {value!r} is no text; {allowed}.") from None
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: the file {value!r} {error}") from None
    return DraftIds(max(FEWEST_IDS, len(first)), first)


def special_ids(target_worker: Any) -> list[int]:
    """Ids of the target that are always in: what ends an answer, then the tokenizer's special and added tokens."""
    tokenizer = target_worker.tokenizer
    ends = sorted(target_worker.model_runner.model_config.hf_eos_token_id or ())
    if tokenizer is None:  # --skip-tokenizer-init
        return ends
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()  # SGLang's tiktoken class has none
    special = [one for one in getattr(tokenizer, "all_special_ids", ()) if one is not None]
    return [*ends, *special, *sorted(added.values())]


class ShortHead:
    """A copy of N rows of this rank's span of the head, and their ids.

    A captured graph reads both tensors at their places, so they are changed in place, between forwards.
    """

    def __init__(self, lm_head: Any, vocabulary: DraftVocabulary) -> None:
        """lm_head: the target's, dense; its weight is read at every exchange."""
        self._lm_head, self._vocabulary = lm_head, vocabulary
        source = lm_head.weight
        self.ids = torch.from_numpy(vocabulary.ids).to(source.device, copy=True)  # [N] int64, of the span
        self.weight = torch.empty(len(self.ids), source.shape[1], dtype=source.dtype, device=source.device)
        self._piece = max(1, PIECE_BYTES // (source.shape[1] * source.element_size()))  # rows
        self._followed: dict[int, tuple[Any, int]] = {}  # id of a `Req` -> it, and how many of its answer are counted
        self._steps = 0
        self._stale = False
        self.take_up()

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def mark_stale(self) -> None:
        """The target's weights have changed. The next exchange copies all rows anew: an update may have many parts, and
        on an accelerator only an exchange runs on the forwards' stream."""
        self._stale = True

    def take_up(self) -> None:
        """Copies all rows anew."""
        with torch.no_grad():
            torch.index_select(self._lm_head.weight, 0, self.ids, out=self.weight)
        self._stale = False

    def exchange(self) -> None:
        """Between two forwards: copies the rows of some ids that have become likelier than others."""
        if self._stale:
            self.take_up()
        swaps = self._vocabulary.next_swaps(self._piece)
        if swaps is None:
            return
        places, ids = upload(torch.from_numpy(np.stack(swaps)), self.ids.device)
        with torch.no_grad():
            self.weight.index_copy_(0, places, self._lm_head.weight.index_select(0, ids))
            self.ids.index_copy_(0, places, ids)

    def see_prompts(self, reqs: Sequence[Any]) -> None:
        """Counts the prompts of SGLang's requests that are prefilled now, and the answers of those that have ended:
        where requests end at their first token, no decode step counts them."""
        ended = [key for key, (req, _) in self._followed.items() if req.finished()]
        seen = [self._emitted(*self._followed.pop(key)) for key in ended]
        new = [req for req in reqs if id(req) not in self._followed]
        self._followed |= {id(req): (req, len(req.output_ids)) for req in new}
        seen += [np.array(req.origin_input_ids, dtype=np.int64) for req in new]
        if seen:
            self._vocabulary.count(np.concatenate(seen))

    def see_answers(self, reqs: Sequence[Any]) -> None:
        """Counts, every few steps, what the running requests have emitted, and those that have left."""
        self._steps += 1
        if self._steps < COUNTED_STEPS:
            return
        self._steps = 0
        emitted = [self._emitted(*followed) for followed in self._followed.values()]
        self._followed = {id(req): (req, len(req.output_ids)) for req in reqs}
        if emitted:
            self._vocabulary.count(np.concatenate(emitted))

    @staticmethod
    def _emitted(req: Any, counted: int) -> np.ndarray:
        """What a request has emitted and is not counted yet."""
        return np.array(req.output_ids[counted:], dtype=np.int64)

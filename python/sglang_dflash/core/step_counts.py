"""Counts what decode steps verified and accepted, by width and by position, for metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

PREFIX = "sglang_dflash:"
"""Of the names in `/metrics`. What follows is named like vLLM's counters, where vLLM has one."""
REQUEST_STEPS = "spec_decode_num_request_steps"
DRAFTS = "spec_decode_num_drafts"
DRAFT_TOKENS = "spec_decode_num_draft_tokens"
ACCEPTED = "spec_decode_num_accepted_tokens"
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
STEPS = "spec_decode_num_steps"
DRAFT_KV = "draft_kv_tokens"

COUNTERS = {
    REQUEST_STEPS: "Decode steps, counted once for each of their requests.",
    DRAFTS: "Of these, those in which drafts of the request were verified.",
    DRAFT_TOKENS: "Drafts that were verified: rows without the anchors.",
    ACCEPTED: "Drafts that were accepted.",
    BY_POSITION: "Drafts that were accepted, by their position in the block, from 0.",
    STEPS: "Decode steps, by their width: the most rows of one of their requests; 1 is a plain step.",
    DRAFT_KV: "Prompt tokens whose draft KV prefills have computed, that is, not found in the cache.",
}
"""Name -> what is counted."""
LABELS = {BY_POSITION: "position", STEPS: "width"}
"""The label that a counter has besides SGLang's."""


class StepCounts:
    """Sums over decode steps, since the start."""

    def __init__(self, block_size: int, most_rows: int) -> None:
        """block_size: K, so positions are 0 to K - 2; most_rows: of one request in any step."""
        self._positions = block_size - 1
        self._accepted = [0] * max(block_size, most_rows)  # request-steps by number of accepted drafts
        self._widths = [0] * (most_rows + 1)  # steps by width
        self._drafts = self._rows = 0

    def add(self, accept_lens: Sequence[int], lens: Sequence[int]) -> None:
        """A step with at least one request. Of each: accepted drafts, and verified rows, the anchor included."""
        self._widths[max(lens)] += 1
        self._rows += sum(lens)
        self._drafts += len(lens) - lens.count(1)
        for count in accept_lens:
            self._accepted[count] += 1

    def values(self) -> Iterator[tuple[str, str, int]]:
        """Counter, value of its label ("" without one), and count; always the same ones, in the same order."""
        request_steps = sum(self._accepted)
        at_least = list(accumulate(reversed(self._accepted)))[::-1]  # request-steps that accepted so many or more
        yield REQUEST_STEPS, "", request_steps
        yield DRAFTS, "", self._drafts
        yield DRAFT_TOKENS, "", self._rows - request_steps
        yield ACCEPTED, "", sum(at_least[1:])
        yield from ((BY_POSITION, str(place), at_least[place + 1]) for place in range(self._positions))
        yield from ((STEPS, str(width), self._widths[width]) for width in range(1, len(self._widths)))

"""Held-out tau: counts the verify steps that a draft needs for given answers of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.training.blocks import IGNORED, make_blocks, split_attention
from sglang_dflash.training.conversations import collate
from sglang_dflash.training.data import LEARNED
from sglang_dflash.training.frozen import FrozenTarget

# Number of blocks whose masks and logits are in memory at a time.
_BLOCKS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Verify steps by accept_len, 0 first: `steps[n]` of them accepted n drafts."""

    steps: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Mean commit_len; 0.0 without steps."""
        total = sum(self.steps)
        return 1 + sum(n * count for n, count in enumerate(self.steps)) / total if total else 0.0

    @property
    def by_position(self) -> list[float]:
        """Share of all steps whose draft at block row 1, 2, ... is accepted."""
        total = max(1, sum(self.steps))
        return [sum(self.steps[k:]) / total for k in range(1, len(self.steps))]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out acceptance by kind of text."""

    by_kind: Mapping[str, Acceptance]

    @property
    def whole(self) -> Acceptance:
        """Of all kinds together."""
        return Acceptance(tuple(map(sum, zip(*(one.steps for one in self.by_kind.values()), strict=True))))

    @property
    def measured(self) -> str:
        """What to call the tau."""
        return "Tau" if LEARNED in self.by_kind else "Held-out tau"

    def row(self) -> dict[str, Any]:
        """As metrics.jsonl has it."""
        kinds = {"by_kind": {kind: one.tau for kind, one in self.by_kind.items()}} if len(self.by_kind) > 1 else {}
        return {"tau": self.whole.tau, "by_position": self.whole.by_position, **kinds}

    def __str__(self) -> str:
        shares = " ".join(f"{share:.0%}" for share in self.whole.by_position)
        rows = f"block rows 1 to {len(self.whole.by_position)}"
        kinds = ", ".join(f"{kind} {one.tau:.2f}" for kind, one in self.by_kind.items())
        kinds = f" ({kinds})" if len(self.by_kind) > 1 else ""
        return f"{self.measured}: {self.whole.tau:.2f}{kinds}. Share of steps that accept {rows}: {shares}"


@torch.no_grad()
def accept_lens(
    draft: DFlashDraftModel,
    target: FrozenTarget,
    ids: torch.Tensor,
    features: torch.Tensor,
    anchors: torch.Tensor,
    end: int,
) -> list[int]:
    """The accept_len of the block at each anchor, if the text after the anchor is the target's greedy answer.

    Args:
        ids: [1, T] int64.
        features: [1, T, taps * H]; the target's, of `ids`.
        anchors: [A] int64, each < end - 1.
        end: end of the answer, exclusive; drafts beyond it are not counted.
    """
    learned = (torch.arange(ids.shape[1], device=ids.device) < end)[None]
    context = torch.arange(ids.shape[1], device=ids.device)[None]
    found: list[int] = []
    for some in anchors.split(_BLOCKS_AT_ONCE):
        first = draft.draft_config.anchor_first
        blocks = make_blocks(ids, learned, some[None], draft.block_size, draft.mask_token_id, first)
        masks = {kind: split_attention(blocks, ids.shape[1], kind) for kind in set(draft.draft_config.attention)}
        positions = torch.cat((context, blocks.positions), 1)
        hidden = draft(target.embed(blocks.ids), features, positions, masks, block_size=draft.block_size)
        hidden = hidden.view(len(some), draft.block_size, -1)
        labels = blocks.labels.view(len(some), -1)[:, 1 - first :]
        right = (draft.choose(hidden, ids[0, some], target.head, target.embed) == labels) & (labels != IGNORED)
        found += right.long().cumprod(1).sum(1).tolist()
    return found


@torch.no_grad()
def held_out_acceptance(
    draft: DFlashDraftModel,
    target: FrozenTarget,
    samples: Iterable[Mapping[str, Any]],
    features: Callable[[Sequence[Mapping[str, Any]], torch.Tensor], torch.Tensor],
    device: torch.device,
) -> Acceptance:
    """Walks each answer as decoding does: the first block starts at its first token, the next commit_len tokens later.

    Exact if the answers are the target's greedy ones (`--regenerate`); an estimate for other text.

    Args:
        features: samples and their ids [B, T] -> context features [B, T, taps * H].
    """
    steps = [0] * draft.draft_config.most_rows
    draft.eval()
    for sample in samples:
        ids, _ = collate([sample], device)
        known = features([sample], ids)
        for start, end in sample["spans"]:
            if end - start < 2:
                continue  # the answer's first token comes from the prefill, without a verify step
            anchors = torch.arange(start, end - 1, device=device)
            lens = accept_lens(draft, target, ids, known, anchors, end)
            anchor = start
            while anchor < end - 1:
                accept_len = lens[anchor - start]
                steps[accept_len] += 1
                anchor += accept_len + 1
    draft.train()
    return Acceptance(tuple(steps))

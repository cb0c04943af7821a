"""Training of the draft on the target's own answers, with random anchors (DFlash paper, appendix A.1)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

from .draft import BLOCK_SIZE, DFlashDraft
from .optim import learning_rate, make_optimizers, take_step
from .progress import Progress
from .regenerate import Answer

_ANCHORS = 10
_LOSS_DECAY = 4.0
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Blocks:
    """`_ANCHORS` blocks of each answer of a batch; Q = _ANCHORS * BLOCK_SIZE rows in all."""

    ids: torch.Tensor  # [N, Q] int64: anchor, then masks
    labels: torch.Tensor  # [N, Q] int64: the clean token at the row's own position
    taps: torch.Tensor  # [N, T, 3*H] float32
    positions: torch.Tensor  # [N, T+Q] int64, context first
    mask: torch.Tensor  # [N, 1, Q, T+Q] bool, True: may attend


def make_blocks(batch: list[Answer], mask_token_id: int, draw: torch.Generator) -> Blocks:
    """Blocks at random anchors; anchor and next token both lie in the answer.

    A block sees the context strictly below its anchor and itself in both directions, but no other block.
    """
    lengths = torch.tensor([len(answer.ids) for answer in batch])  # [N] int64
    starts = torch.tensor([answer.prompt_len for answer in batch])
    ids = nn.utils.rnn.pad_sequence([answer.ids for answer in batch], batch_first=True)  # [N, T] int64
    taps = nn.utils.rnn.pad_sequence([answer.taps for answer in batch], batch_first=True).float()
    count, width = ids.shape
    room = (lengths - 1 - starts)[:, None]
    anchors = starts[:, None] + (torch.rand(count, _ANCHORS, generator=draw) * room).long()  # [N, A] int64
    offsets = torch.arange(BLOCK_SIZE)
    rows = (anchors[:, :, None] + offsets).flatten(1)  # [N, Q] int64: absolute positions
    clean = ids.gather(1, rows.clamp(max=width - 1))
    is_anchor = (offsets == 0).repeat(_ANCHORS)
    block_ids = torch.where(is_anchor, clean, mask_token_id)
    labels = clean.masked_fill(is_anchor | (rows >= lengths[:, None]), _IGNORED)
    below = torch.arange(width) < anchors.repeat_interleave(BLOCK_SIZE, dim=1)[:, :, None]  # [N, Q, T] bool
    block_of = torch.arange(_ANCHORS).repeat_interleave(BLOCK_SIZE)
    own = (block_of[:, None] == block_of).expand(count, -1, -1)  # [N, Q, Q] bool
    context = torch.arange(width).expand(count, -1)
    return Blocks(block_ids, labels, taps, torch.cat((context, rows), 1), torch.cat((below, own), 2)[:, None])


def block_loss(draft: DFlashDraft, embedding: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Cross-entropy of every masked row, weighted exp(-(k-1)/4) by its index k in the block."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = draft(F.embedding(blocks.ids, embedding), blocks.taps, blocks.positions, blocks.mask)
        wanted = blocks.labels != _IGNORED
        logits = F.linear(hidden[wanted], embedding)  # [labels, vocab]; the head is the tied embedding
    index = torch.arange(BLOCK_SIZE).repeat(_ANCHORS).expand_as(blocks.labels)[wanted]
    weight = torch.exp(-(index - 1) / _LOSS_DECAY)
    loss = F.cross_entropy(logits.float(), blocks.labels[wanted], reduction="none")
    return (loss * weight).sum() / weight.sum()


def _batches(answers: list[Answer], size: int, rng: random.Random) -> Iterator[list[Answer]]:
    while True:
        order = sorted(rng.sample(answers, len(answers)), key=lambda answer: len(answer.ids))
        starts = list(range(0, max(1, len(order) - size + 1), size))
        rng.shuffle(starts)
        for start in starts:
            yield order[start : start + size]


def train_draft(
    target: Qwen3ForCausalLM,
    answers: list[Answer],
    mask_token_id: int,
    *,
    steps: int,
    batch: int,
    peak: float,
    seed: int,
) -> DFlashDraft:
    """A draft trained for `steps` batches of `batch` answers; the target's embedding stays frozen."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    draft = DFlashDraft(target.config)
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=target.config.initializer_range)
    embedding = target.model.embed_tokens.weight.detach()
    optimizers = make_optimizers(draft, peak)
    progress = Progress("draft", steps)
    queue = _batches(answers, batch, random.Random(seed))
    for step in range(steps):
        blocks = make_blocks(next(queue), mask_token_id, draw)
        loss = block_loss(draft, embedding, blocks)
        loss.backward()
        take_step(draft, optimizers, learning_rate(step, steps, peak))
        progress.add(loss.item(), blocks.ids.numel())
    return draft.eval()

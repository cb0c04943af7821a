"""Trains an embedded draft a little further, so that it depends on what its config says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_dflash.reference import DFlashDraftModel, FeatureTaps, LayerAttention
from sglang_dflash.serving import TINY_TARGET
from sglang_dflash.training.blocks import IGNORED, Blocks, make_blocks, sample_anchors, split_attention

BATCH, ANCHORS = 6, 16
BADLY = 3.0
"""Cross-entropy that is bad enough under a wrong mask; even chances among the target's ids have 7.5."""


def fine_tune(
    folder: Path,
    pairs: Sequence[tuple[list[int], list[int]]],
    steps: int,
    learning_rate: float,
    wrong: Sequence[LayerAttention] = (),
) -> None:
    """Trains the draft in a folder by its config, and saves its weights there.

    Args:
        pairs: prompts and answers as ids.
        wrong: attention of all layers, in turn step by step, under which the draft is to draft badly.
    """
    draft = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    target = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32).eval()
    taps, first = FeatureTaps(target, draft.target_layer_ids), draft.draft_config.anchor_first
    optimizer = torch.optim.AdamW(draft.parameters(), lr=learning_rate)
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other processes of the run have the other cores
    for step in range(steps):
        some = [pairs[(step * BATCH + n) % len(pairs)] for n in range(BATCH)]
        rows = [torch.tensor([*prompt, *answer]) for prompt, answer in some]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        learned = torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(some):
            learned[row, len(prompt) : len(prompt) + len(answer)] = True
        with torch.no_grad(), taps:
            target(ids)
            features = taps.take()
        anchors = sample_anchors(learned, ANCHORS, generator)
        blocks = make_blocks(ids, learned, anchors, draft.block_size, draft.mask_token_id, first)
        loss = _loss(draft, target, features, blocks)
        if wrong:
            loss = loss + F.relu(BADLY - _loss(draft, target, features, blocks, wrong[step % len(wrong)]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    trained = {name: weight.detach().to(torch.bfloat16) for name, weight in draft.state_dict().items()}
    file = folder / "model.safetensors"
    save_file(load_file(file) | trained, file, metadata={"format": "pt"})


def _loss(
    draft: DFlashDraftModel,
    target: PreTrainedModel,
    features: torch.Tensor,
    blocks: Blocks,
    seen: LayerAttention | None = None,
) -> torch.Tensor:
    """Mean cross-entropy of all labelled rows. seen: attention of all layers instead of the draft's own."""
    context_len = features.shape[1]
    context = torch.arange(context_len).expand(len(features), -1)
    kinds = set(draft.draft_config.attention)
    masks = {kind: split_attention(blocks, context_len, seen or kind) for kind in kinds}
    rows = target.get_input_embeddings()(blocks.ids).detach()
    hidden = draft(rows, features, torch.cat((context, blocks.positions), 1), masks, block_size=blocks.block_size)
    logits = target.lm_head(hidden).flatten(0, 1)
    return F.cross_entropy(logits, blocks.labels.flatten(), ignore_index=IGNORED)

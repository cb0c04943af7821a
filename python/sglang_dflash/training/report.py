"""Writes the files that people read after a run: the curves as PNG and the model card."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

from sglang_dflash import __version__
from sglang_dflash.reference import DFlashDraftModel
from sglang_dflash.training.data import Data
from sglang_dflash.training.evaluation import Evaluation
from sglang_dflash.training.options import OF_TARGET, TrainOptions, default_gamma

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_LIBRARIES = ("torch", "transformers", "accelerate", "datasets")


@dataclass(frozen=True, slots=True)
class Card:
    """What a draft's README tells. `tokens`: learned tokens over all epochs; `hours`: the training's duration."""

    options: TrainOptions
    draft: DFlashDraftModel
    data: Data
    evaluation: Evaluation
    tokens: int
    hours: float


def draw_curves(history: list[dict[str, Any]], path: Path) -> None:
    """Plots loss over steps, held-out tau over tokens and hours, and acceptance by block row, first and last."""
    losses = [row for row in history if "loss" in row]
    taus = [row for row in history if "tau" in row]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    left.plot([row["step"] for row in losses], [row["loss"] for row in losses], color="tab:gray", linewidth=1)
    left.set(title="Training loss", xlabel="step", ylabel="weighted cross-entropy")
    millions = [row["tokens"] / 1e6 for row in taus]
    for kind in taus[-1].get("by_kind", {}) if taus else ():
        middle.plot(millions, [row["by_kind"][kind] for row in taus], linewidth=1, label=kind)
    middle.plot(millions, [row["tau"] for row in taus], marker="o", markersize=3, label="all")
    middle.set(title="Held-out tau", xlabel="million learned tokens, all epochs", ylabel="tokens per verify step")
    middle.legend()
    if len(taus) > 1 and taus[-1]["hours"] > 0:
        rate = millions[-1] / taus[-1]["hours"]
        hours = middle.secondary_xaxis(-0.25, functions=(lambda x: x / rate, lambda x: x * rate))
        hours.set_xlabel("hours")
    for row, color in zip(sorted({0, len(taus) - 1} if taus else ()), ("tab:gray", "tab:blue"), strict=False):
        shares = taus[row]["by_position"]
        label = f"step {taus[row]['step']}"
        right.plot(range(1, len(shares) + 1), [100 * share for share in shares], marker="o", color=color, label=label)
    right.set(title="Acceptance by block row", xlabel="row k", ylabel="% of verify steps", ylim=(0, 100))
    right.legend()
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_card(path: Path, card: Card) -> None:
    """Writes the checkpoint's README: target, held-out tau by kind, training data, settings, and how to serve it.

    The head is YAML with the hub's `model-index`.
    """
    options, whole = card.options, card.evaluation.whole
    config, name = card.draft.draft_config, Path(options.target).name
    files = "\n".join(f"  * `{Path(file).name}`, sha256 `{digest(file)}`" for file in options.data)
    versions = ", ".join(f"{library} {version(library)}" for library in _LIBRARIES)
    rows = "\n".join(f"| {k} | {share:.1%} |" for k, share in enumerate(whole.by_position, start=1))
    measured = card.evaluation.measured
    kinds = "\n".join(
        f"| {kind} | {len(card.data.held_out[kind])} | {one.tau:.2f} |" for kind, one in card.evaluation.by_kind.items()
    )
    index = "".join(
        f"""
  - task: {{type: text-generation}}
    dataset: {{name: {json.dumps(kind)}, type: {json.dumps(kind)}}}
    metrics: [{{type: tau, name: {measured}, value: {one.tau:.2f}}}]"""
        for kind, one in card.evaluation.by_kind.items()
    )
    gamma = options.gamma or default_gamma(config.block_size)
    weighting = "D-PACE" if options.loss == "dpace" else f"exp(-(k-1)/{gamma:g})"
    ends = f"{options.epochs} epochs" + (f", at most {options.max_steps} steps" if options.max_steps else "")
    kind, selector, convolution = "plain DFlash draft", config.selector, config.convolution
    if selector is not None:
        kind = f"DFlash2 draft with a selector of rank {selector.rank} over {selector.top_k} candidates"
        kind += f" and convolutions over {convolution.taps} rows" if convolution is not None else ""
    windows = ""
    if any(kind.window for kind in config.attention):
        windows = f", windows {[kind.window for kind in config.attention]}"
    begun = {None: "random weights", OF_TARGET: "the target's last layers"}.get(options.init, f"`{options.init}`")
    softmax = f", a softmax over {options.loss_ids:,} ids" if options.loss_ids else ""
    path.write_text(
        f"""---
base_model: {options.target}
tags: [dflash, speculative-decoding]
model-index:
- name: {json.dumps(path.parent.name)}
  results:{index}
---

# A DFlash draft for {name}

A {kind} (arXiv 2602.06036) of {config.num_layers} layers: block size {config.block_size}, target layers
{list(config.target_layer_ids)}, mask token {config.mask_token_id}{windows}.
It has no embedding and no head; it uses the target's.

{measured} {whole.tau:.2f} over {sum(whole.steps):,} verify steps of {card.data.held_out_count} conversations:

| held-out text | conversations | tau |
|---|---|---|
{kinds}

| block row | accepted, share of the steps |
|---|---|
{rows}

![curves](curves.png)

## Training data

{len(card.data.learned):,} conversations:

{files}

## Training settings

* sglang-dflash {__version__}, {versions}, Python {platform.python_version()}
* started from {begun}
* {ends}; conversations per micro-batch: {options.batch_size}; micro-batches per step: {options.accumulate}
* {card.tokens:,} learned tokens in {card.hours:.2f} hours
* up to {options.anchors} blocks per conversation, at random anchors; loss weights {weighting}{softmax}
* AdamW, peak learning rate {options.learning_rate:g}, {options.warm_up:.0%} warm-up, then a cosine decay to zero
* at most {options.max_length} tokens per conversation; seed {options.seed}

## Serving

    python -m sglang.launch_server --model-path {options.target} \\
        --speculative-algorithm DFLASH --speculative-draft-model-path THIS_FOLDER
"""
    )


def digest(path: str) -> str:
    """The first 16 hexadecimal digits of a file's sha256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]

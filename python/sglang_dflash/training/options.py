"""The options of a training run, checked before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

HEADS = ("dflash", "dflash2")
LOSSES = ("decay", "dpace")
ATTENTIONS = ("auto", "flex", "dense")
PRECISIONS = ("auto", "bf16", "float32")
# Block size -> the paper's gamma (appendix A.1).
_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}
# A resumed run may change these: they do not change what the run computes.
_FREE = ("output", "resume", "eval_every", "save_every", "log_every", "keep_checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of one run. The defaults are the paper's (appendix A.1) where it gives them.

    Fields:
        target: folder or hub name of any Hugging Face causal language model.
        data: JSONL files of conversations.
        output: folder for checkpoint, card and curves.
        head: "dflash2" adds convolutions and a selector to the plain draft.
        conv_kernel_size, conv_group_size: of DFlash2's convolutions; 0 taps: none.
        selector_rank, selector_top_k: of DFlash2's selector.
        selector_weight: of the selector's loss, beside the plain one.
        layers: number of draft layers.
        block_size: K, anchor included.
        taps: 0-based target layers to read; None: `num_taps` of them (default: `layers`), by the published formula.
        sliding_window: window size as in Hugging Face, the row itself included; None: no sliding layers.
        sliding_layers: how many layers slide, from the first; None: all but the last.
        is_causal: whether rows see no later rows of their block, in all layers; None: only in sliding layers.
        mask_token_id: None: the tokenizer's mask token, else the first id that the tokenizer does not use.
        init: a draft to start from instead of random weights; its shape overrides layers, block size, taps and windows,
            and a DFlash2 draft stays one. A plain one becomes one if `head` says so.
        loss: "decay" weights position k by exp(-(k-1)/gamma); "dpace" by the draft's own confidence.
        gamma: None: the paper's for this block size.
        anchors: maximum number of blocks per conversation and step.
        batch_size: conversations per process and micro-batch; `accumulate` micro-batches make one step.
        max_length: maximum tokens per conversation; longer ones are cut.
        epochs, max_steps: the run ends at whichever comes first.
        precision: of the draft's forward pass; the weights stay float32. "auto": bf16 on CUDA, else float32.
        held_out: share of the conversations (at least one) kept for held-out tau.
        held_out_data: JSONL file for held-out tau, used instead of that share.
        held_out_limit: maximum conversations per evaluation.
        chat_template_kwargs: passed to the tokenizer's chat template, for example {"enable_thinking": false}.
    """

    target: str
    data: tuple[str, ...]
    output: str
    head: str = "dflash"
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    selector_weight: float = 1.0
    layers: int = 5
    block_size: int = 16
    taps: tuple[int, ...] | None = None
    num_taps: int | None = None
    sliding_window: int | None = None
    sliding_layers: int | None = None
    is_causal: bool | None = None
    mask_token_id: int | None = None
    init: str | None = None
    loss: str = "decay"
    gamma: float | None = None
    dpace_alpha: float = 0.5
    anchors: int = 512
    batch_size: int = 1
    accumulate: int = 1
    max_length: int = 3072
    epochs: int = 6
    max_steps: int | None = None
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: str = "auto"
    target_dtype: str = "auto"
    attention: str = "auto"
    seed: int = 0
    held_out: float = 0.02
    held_out_data: str | None = None
    held_out_limit: int = 64
    eval_every: int = 200
    save_every: int = 500
    log_every: int = 10
    keep_checkpoints: int = 2
    resume: bool = False
    chat_template_kwargs: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError with one sentence that names the flag."""
        positive = ("layers", "batch_size", "accumulate", "anchors", "epochs", "eval_every", "save_every", "log_every")
        dflash2 = ("conv_group_size", "selector_rank", "selector_top_k")
        for name in (*positive, *dflash2, "held_out_limit", "keep_checkpoints"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _need(self.conv_kernel_size >= 0, "conv_kernel_size", self.conv_kernel_size, "0 (no convolution) or more")
        _need(self.selector_weight > 0, "selector_weight", self.selector_weight, "above 0")
        _need(self.block_size >= 2, "block_size", self.block_size, "at least 2")
        _need(self.max_length >= 4, "max_length", self.max_length, "at least 4")
        _need(self.learning_rate > 0, "learning_rate", self.learning_rate, "above 0")
        _need(0 <= self.warm_up < 1, "warm_up", self.warm_up, "a share of the steps, at least 0 and below 1")
        _need(0 <= self.dpace_alpha <= 1, "dpace_alpha", self.dpace_alpha, "from 0 to 1")
        _need(0 < self.held_out < 1, "held_out", self.held_out, "a share between 0 and 1")
        _need(self.clip > 0, "clip", self.clip, "above 0")
        _need(self.gamma is None or self.gamma > 0, "gamma", self.gamma, "above 0")
        _need(self.max_steps is None or self.max_steps >= 1, "max_steps", self.max_steps, "at least 1")
        _need(self.num_taps is None or self.num_taps >= 1, "num_taps", self.num_taps, "at least 1")
        _need(
            self.sliding_window is None or self.sliding_window >= 1, "sliding_window", self.sliding_window, "positive"
        )
        within = self.sliding_layers is None or (self.sliding_window is not None and self.sliding_layers >= 1)
        _need(within, "sliding_layers", self.sliding_layers, "at least 1, and it needs --sliding-window")
        within = self.sliding_layers is None or self.sliding_layers <= self.layers
        _need(within, "sliding_layers", self.sliding_layers, f"at most the draft's {self.layers} layers")
        _need(bool(self.data), "data", "empty", "at least one JSONL file")
        for name, allowed in (
            ("head", HEADS),
            ("loss", LOSSES),
            ("attention", ATTENTIONS),
            ("precision", PRECISIONS),
        ):
            _need(getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(allowed)}")
        rising = self.taps is None or all(first < second for first, second in pairwise(self.taps))
        _need(rising, "taps", self.taps, "layer numbers that rise, because SGLang gives the features in that order")
        if self.taps is not None and self.num_taps not in (None, len(self.taps)):
            raise ValueError(
                f"--num-taps is {self.num_taps}, but --taps names {len(self.taps)} layers; give one of them."
            )
        files = [("data", path) for path in self.data]
        files += [("held_out_data", self.held_out_data)] if self.held_out_data is not None else []
        for name, path in files:
            _need(Path(path).is_file(), name, path, "an existing JSONL file")

    @property
    def layer_types(self) -> list[str]:
        if self.sliding_window is None:
            return ["full_attention"] * self.layers
        sliding = self.sliding_layers if self.sliding_layers is not None else max(1, self.layers - 1)
        return ["sliding_attention"] * sliding + ["full_attention"] * (self.layers - sliding)

    def fingerprint(self) -> str:
        """All options that decide what a run computes, as JSON; a resumed run must have the same."""
        return json.dumps({k: v for k, v in asdict(self).items() if k not in _FREE}, sort_keys=True)

    def difference(self, fingerprint: str) -> list[str]:
        """The flags whose values differ from those in the fingerprint."""
        before, now = json.loads(fingerprint), json.loads(self.fingerprint())
        return [_flag(field.name) for field in fields(self) if before.get(field.name) != now.get(field.name)]


def default_gamma(block_size: int) -> float:
    """The paper's gamma for its three block sizes; linear between and beyond them."""
    if block_size <= 10:
        return block_size / 2
    return _GAMMAS[10] + (block_size - 10) * (_GAMMAS[16] - _GAMMAS[10]) / 6


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _need(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{_flag(name)} is {value}; it must be {allowed}.")

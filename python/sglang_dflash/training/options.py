"""The options of a training run, checked before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

HEADS = ("dflash", "dflash2")
LOSSES = ("decay", "dpace")
ATTENTIONS = ("auto", "flex", "split", "dense")
OF_TARGET = "target"  # the value of --init that takes the target's own layers
PRECISIONS = ("auto", "bf16", "float32")
# Block size -> the paper's gamma (appendix A.1).
_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}
# A resumed run may change these: they do not change what the run computes.
_FREE = ("output", "cache", "resume", "eval_every", "save_every", "log_every", "keep_checkpoints")


_data = partial(typer.Option, rich_help_panel="Target and data")
_run = partial(typer.Option, rich_help_panel="Run")
_shape = partial(typer.Option, rich_help_panel="Draft")
_learning = partial(typer.Option, rich_help_panel="Learning")


def layer_list(text: str) -> tuple[int, ...]:
    """The value of --taps; raises ValueError if it is not a list of numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--taps is {text!r}; it must be layer numbers separated by commas, such as 1,9,17.") from None


def mask_token(text: str) -> int | str:
    """The value of --mask-token-id; raises ValueError if it is neither an id nor auto."""
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"--mask-token-id is {text!r}; it must be a token id or auto.")
    return text if text == "auto" else int(text)


def template_kwargs(text: str) -> tuple[tuple[str, Any], ...]:
    """The value of --chat-template-kwargs, sorted by name; raises ValueError if it is not a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(
            f'--chat-template-kwargs is {text!r}; it must be a JSON object such as {{"enable_thinking": false}}.'
        )
    return tuple(sorted(value.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of one run, and of `sglang-dflash train`; a function behind an option reads its text.

    The defaults are the paper's (appendix A.1) where it gives them. Beyond the help texts: `taps` are 0-based and
    `num_taps` of them (default: `layers`) follow the published formula; `sliding_window` counts as in Hugging Face, the
    row itself included; `loss` "decay" weights position k by exp(-(k-1)/gamma), "dpace" by the draft's own confidence;
    a DFlash2 draft in `init` stays one, and a plain one becomes one if `head` says so; the draft's weights stay float32
    whatever `precision` its forward pass has; the run ends at `epochs` or `max_steps`, whichever comes first.
    """

    target: Annotated[str, _data(help="Target: folder or hub name of a Hugging Face causal language model.")]
    data: Annotated[
        tuple[str, ...], _data(help="JSONL file of conversations; may be given several times.", metavar="PATH")
    ]
    output: Annotated[
        str, _run(help="Folder for the draft, its model card, curves, metrics and checkpoints.", metavar="PATH")
    ]
    head: Annotated[str, _shape(help="dflash (plain), or dflash2, which adds convolutions and a selector.")] = "dflash"
    conv_kernel_size: Annotated[
        int, _shape(help="With --head dflash2: rows that a convolution reads; 0: no convolutions.")
    ] = 2
    conv_group_size: Annotated[
        int, _shape(help="With --head dflash2: channels of a convolution's group; it must divide the hidden size.")
    ] = 16
    selector_rank: Annotated[int, _shape(help="With --head dflash2: rank of the selector's tables.")] = 256
    selector_top_k: Annotated[int, _shape(help="With --head dflash2: candidates of each row.")] = 16
    layers: Annotated[int, _shape(help="Number of draft layers.")] = 5
    block_size: Annotated[int, _shape(help="Rows per block, anchor included.")] = 16
    taps: Annotated[
        tuple[int, ...] | None,
        _shape(help="Target layers to read, such as 1,9,17. Default: by the published formula."),
        layer_list,
    ] = None
    num_taps: Annotated[
        int | None, _shape(help="Number of target layers for the formula. Default: one per draft layer.")
    ] = None
    sliding_window: Annotated[
        int | None, _shape(help="Window of the sliding layers, in tokens. Default: no sliding layers.")
    ] = None
    sliding_layers: Annotated[
        int | None,
        _shape(help="With --sliding-window: number of sliding layers, from the first. Default: all but the last."),
    ] = None
    is_causal: Annotated[
        bool | None,
        _shape(help="Whether rows see no later rows of their block, in all layers. Default: only in sliding layers."),
    ] = None
    mask_token_id: Annotated[
        int | str | None,
        _shape(
            help="Mask token. Default: the tokenizer's mask token, else the id after its last one. auto: else a "
            "special token that the data does not have."
        ),
        mask_token,
    ] = None
    init: Annotated[
        str | None,
        _shape(
            help="Draft to start from: folder or hub name, whose config overrides the flags of this group; target: the "
            "target's own last layers."
        ),
    ] = None
    loss: Annotated[str, _learning(help="Loss weights: decay (the paper's) or dpace.")] = "decay"
    gamma: Annotated[
        float | None, _learning(help="Gamma of --loss decay. Default: the paper's for the block size.")
    ] = None
    dpace_alpha: Annotated[float, _learning(help="Smoothing of --loss dpace, from 0 to 1.")] = 0.5
    selector_weight: Annotated[
        float, _learning(help="With --head dflash2: weight of the selector's loss beside the plain one.")
    ] = 1.0
    loss_ids: Annotated[
        int,
        _learning(help="Ids in the softmax of the loss: the frequent ones, and drawn ones for the others. 0: all."),
    ] = 0
    anchors: Annotated[int, _learning(help="Maximum blocks per conversation and step.")] = 512
    batch_size: Annotated[int, _learning(help="Conversations per micro-batch and process.")] = 1
    accumulate: Annotated[int, _learning(help="Micro-batches per step.")] = 1
    epochs: Annotated[int, _learning(help="Passes over the data.")] = 6
    max_steps: Annotated[int | None, _learning(help="Maximum number of steps.")] = None
    learning_rate: Annotated[float, _learning(help="Peak learning rate.")] = 6e-4
    warm_up: Annotated[float, _learning(help="Share of the steps in which the learning rate rises.")] = 0.04
    weight_decay: Annotated[float, _learning(help="Weight decay of AdamW.")] = 0.0
    clip: Annotated[float, _learning(help="Maximum norm of the gradient.")] = 1.0
    max_length: Annotated[int, _data(help="Maximum tokens per conversation; longer ones are cut.")] = 3072
    held_out: Annotated[float, _data(help="Share of the data kept to measure held-out tau.")] = 0.02
    held_out_data: Annotated[
        tuple[str, ...],
        _data(
            help="JSONL file for held-out tau, instead of a share of --data; given several times: tau of each.",
            metavar="PATH",
        ),
    ] = ()
    held_out_limit: Annotated[int, _data(help="Maximum conversations per evaluation, of each file.")] = 64
    chat_template_kwargs: Annotated[
        tuple[tuple[str, Any], ...],
        _data(help='JSON object, such as {"enable_thinking": false}. Default: {}.', show_default=False),
        template_kwargs,
    ] = ()
    precision: Annotated[
        str, _run(help="Of the draft's forward pass: bf16, float32, or auto (bf16 on CUDA, else float32).")
    ] = "auto"
    target_dtype: Annotated[
        str, _run(help="bfloat16, float16, float32, or auto (the checkpoint's; float32 on a CPU).")
    ] = "auto"
    attention: Annotated[
        str,
        _run(help="flex (no dense mask), split (no scores between blocks), dense; auto: flex on CUDA, else split."),
    ] = "auto"
    cache: Annotated[
        str | None,
        _run(help="Folder that keeps the target's features for later epochs and runs. Default: none.", metavar="PATH"),
    ] = None
    seed: Annotated[int, _run(help="Seed of data order, anchors and initial weights.")] = 0
    eval_every: Annotated[int, _run(help="Steps between evaluations.")] = 200
    save_every: Annotated[int, _run(help="Steps between checkpoints.")] = 500
    log_every: Annotated[int, _run(help="Steps between loss rows in metrics.jsonl.")] = 10
    keep_checkpoints: Annotated[int, _run(help="Number of checkpoints to keep.")] = 2
    resume: Annotated[bool, _run("--resume", help="Go on from the last checkpoint in --output.")] = False

    def __post_init__(self) -> None:
        """Raises ValueError with one sentence that names the flag."""
        positive = ("layers", "batch_size", "accumulate", "anchors", "epochs", "eval_every", "save_every", "log_every")
        dflash2 = ("conv_group_size", "selector_rank", "selector_top_k")
        for name in (*positive, *dflash2, "held_out_limit", "keep_checkpoints"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _need(self.conv_kernel_size >= 0, "conv_kernel_size", self.conv_kernel_size, "0 (no convolution) or more")
        _need(self.selector_weight > 0, "selector_weight", self.selector_weight, "above 0")
        _need(self.loss_ids == 0 or self.loss_ids >= 64, "loss_ids", self.loss_ids, "0 (all) or at least 64")
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
        files += [("held_out_data", path) for path in self.held_out_data]
        stems = [Path(path).stem for path in self.held_out_data]
        _need(len(set(stems)) == len(stems), "held_out_data", ", ".join(stems), "files of different names")
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
        kept = {k: v for k, v in asdict(self).items() if k not in _FREE}
        # Where the cache lies is free. Whether there is one is not: it keeps bfloat16.
        return json.dumps({**kept, "cache": self.cache is not None}, sort_keys=True)

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

"""`sglang-dflash train`: trains a draft for your own target."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dflash.cli.regenerate import parse_template_kwargs, regenerate

if TYPE_CHECKING:
    from sglang_dflash.training import TrainOptions

_SHAPE, _LEARNING, _RUN, _DATA = "Draft", "Learning", "Run", "Target and data"


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


def train(
    target: Annotated[str, _option(_DATA, "Target: folder or hub name of a Hugging Face causal language model.")],
    data: Annotated[list[Path], _option(_DATA, "JSONL file of conversations; may be given several times.")],
    output: Annotated[Path, _option(_RUN, "Folder for the draft, its model card, curves, metrics and checkpoints.")],
    head: Annotated[
        str, _option(_SHAPE, "dflash (plain), or dflash2, which adds convolutions and a selector.")
    ] = "dflash",
    conv_kernel_size: Annotated[
        int, _option(_SHAPE, "With --head dflash2: rows that a convolution reads; 0: no convolutions.")
    ] = 2,
    conv_group_size: Annotated[
        int, _option(_SHAPE, "With --head dflash2: channels of a convolution's group; it must divide the hidden size.")
    ] = 16,
    selector_rank: Annotated[int, _option(_SHAPE, "With --head dflash2: rank of the selector's tables.")] = 256,
    selector_top_k: Annotated[int, _option(_SHAPE, "With --head dflash2: candidates of each row.")] = 16,
    layers: Annotated[int, _option(_SHAPE, "Number of draft layers.")] = 5,
    block_size: Annotated[int, _option(_SHAPE, "Rows per block, anchor included.")] = 16,
    taps: Annotated[
        str | None, _option(_SHAPE, "Target layers to read, such as 1,9,17. Default: by the published formula.")
    ] = None,
    num_taps: Annotated[
        int | None, _option(_SHAPE, "Number of target layers for the formula. Default: one per draft layer.")
    ] = None,
    sliding_window: Annotated[
        int | None, _option(_SHAPE, "Window of the sliding layers, in tokens. Default: no sliding layers.")
    ] = None,
    sliding_layers: Annotated[
        int | None,
        _option(_SHAPE, "With --sliding-window: number of sliding layers, from the first. Default: all but the last."),
    ] = None,
    is_causal: Annotated[
        bool | None,
        _option(
            _SHAPE, "Whether rows see no later rows of their block, in all layers. Default: only in sliding layers."
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None, _option(_SHAPE, "Mask token. Default: the tokenizer's mask token, else the id after its last one.")
    ] = None,
    init: Annotated[
        str | None,
        _option(_SHAPE, "Draft to start from: folder or hub name. Its config overrides the flags of this group."),
    ] = None,
    loss: Annotated[str, _option(_LEARNING, "Loss weights: decay (the paper's) or dpace.")] = "decay",
    gamma: Annotated[
        float | None, _option(_LEARNING, "Gamma of --loss decay. Default: the paper's for the block size.")
    ] = None,
    dpace_alpha: Annotated[float, _option(_LEARNING, "Smoothing of --loss dpace, from 0 to 1.")] = 0.5,
    selector_weight: Annotated[
        float, _option(_LEARNING, "With --head dflash2: weight of the selector's loss beside the plain one.")
    ] = 1.0,
    anchors: Annotated[int, _option(_LEARNING, "Maximum blocks per conversation and step.")] = 512,
    batch_size: Annotated[int, _option(_LEARNING, "Conversations per micro-batch and process.")] = 1,
    accumulate: Annotated[int, _option(_LEARNING, "Micro-batches per step.")] = 1,
    epochs: Annotated[int, _option(_LEARNING, "Passes over the data.")] = 6,
    max_steps: Annotated[int | None, _option(_LEARNING, "Maximum number of steps.")] = None,
    learning_rate: Annotated[float, _option(_LEARNING, "Peak learning rate.")] = 6e-4,
    warm_up: Annotated[float, _option(_LEARNING, "Share of the steps in which the learning rate rises.")] = 0.04,
    weight_decay: Annotated[float, _option(_LEARNING, "Weight decay of AdamW.")] = 0.0,
    clip: Annotated[float, _option(_LEARNING, "Maximum norm of the gradient.")] = 1.0,
    max_length: Annotated[int, _option(_DATA, "Maximum tokens per conversation; longer ones are cut.")] = 3072,
    held_out: Annotated[float, _option(_DATA, "Share of the data kept to measure held-out tau.")] = 0.02,
    held_out_data: Annotated[
        Path | None, _option(_DATA, "JSONL file for held-out tau, instead of a share of --data.")
    ] = None,
    held_out_limit: Annotated[int, _option(_DATA, "Maximum conversations per evaluation.")] = 64,
    chat_template_kwargs: Annotated[str, _option(_DATA, 'JSON object, such as {"enable_thinking": false}.')] = "{}",
    regenerated: Annotated[
        bool, _option(_DATA, "First replace the answers by the target's own; starts a server for it.", "--regenerate")
    ] = False,
    max_new_tokens: Annotated[int, _option(_DATA, "With --regenerate: maximum tokens per answer.")] = 2048,
    concurrency: Annotated[int, _option(_DATA, "With --regenerate: requests in flight.")] = 64,
    server_args: Annotated[
        str, _option(_DATA, "With --regenerate: more flags of sglang.launch_server, as one quoted string.")
    ] = "",
    precision: Annotated[
        str, _option(_RUN, "Of the draft's forward pass: bf16, float32, or auto (bf16 on CUDA, else float32).")
    ] = "auto",
    target_dtype: Annotated[
        str, _option(_RUN, "bfloat16, float16, float32, or auto (the checkpoint's; float32 on a CPU).")
    ] = "auto",
    attention: Annotated[
        str, _option(_RUN, "flex (holds no dense mask), dense, or auto (flex on CUDA, else dense).")
    ] = "auto",
    seed: Annotated[int, _option(_RUN, "Seed of data order, anchors and initial weights.")] = 0,
    eval_every: Annotated[int, _option(_RUN, "Steps between evaluations.")] = 200,
    save_every: Annotated[int, _option(_RUN, "Steps between checkpoints.")] = 500,
    log_every: Annotated[int, _option(_RUN, "Steps between loss rows in metrics.jsonl.")] = 10,
    keep_checkpoints: Annotated[int, _option(_RUN, "Number of checkpoints to keep.")] = 2,
    resume: Annotated[bool, _option(_RUN, "Go on from the last checkpoint in --output.", "--resume")] = False,
) -> None:
    """Train a DFlash draft for your own target.

    On N devices: torchrun --nproc-per-node N -m sglang_dflash.cli train ...
    """
    given = dict(locals())
    files = [str(path) for path in data]
    for name in ("regenerated", "max_new_tokens", "concurrency", "server_args"):
        del given[name]
    given |= {
        "data": tuple(files),
        "output": str(output),
        "held_out_data": str(held_out_data) if held_out_data else None,
        "taps": _layer_list(taps),
        "chat_template_kwargs": tuple(sorted(parse_template_kwargs(chat_template_kwargs).items())),
    }
    from sglang_dflash.training import TrainOptions

    options = TrainOptions(**given)
    if regenerated:
        _check_before_asking(options)

        def answered(path: str) -> str:
            return _own_answers(path, options, max_new_tokens, concurrency, server_args)

        given["data"] = tuple(answered(path) for path in files)
        if held_out_data is not None:
            given["held_out_data"] = answered(str(held_out_data))
        options = TrainOptions(**given)
    from sglang_dflash.training.trainer import train as run

    run(options)


def _layer_list(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--taps is {text!r}; it must be layer numbers separated by commas, such as 1,9,17.") from None


def _check_before_asking(options: TrainOptions) -> None:
    """Checks before regeneration what would otherwise end the run hours later."""
    from sglang_dflash.training.frozen import check_target
    from sglang_dflash.training.trainer import check_output

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--regenerate runs in one process; under torchrun, first run `sglang-dflash regenerate`.")
    names = [Path(path).name for path in (*options.data, *filter(None, [options.held_out_data]))]
    if len(set(names)) < len(names):
        raise ValueError(
            f"--data has files of the same name: {', '.join(names)}; with --regenerate, names must differ."
        )
    check_target(options)
    check_output(options)


def _own_answers(path: str, options: TrainOptions, max_new_tokens: int, concurrency: int, server_args: str) -> str:
    answers = Path(options.output) / f"answers-{Path(path).name}"
    kwargs = dict(options.chat_template_kwargs)
    regenerate(Path(path), answers, options.target, max_new_tokens, 0.0, concurrency, server_args, json.dumps(kwargs))
    return str(answers)

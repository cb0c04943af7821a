"""What in the files may lower acceptance without ending the start: each is a cause to look at first if tau is low."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from sglang_dflash.core.draft_config import DraftConfig, build_target_layer_ids
from sglang_dflash.core.draft_formats import ZLAB
from sglang_dflash.doctor.card import Card
from sglang_dflash.doctor.checkpoints import Checkpoint
from sglang_dflash.doctor.findings import Finding, ok, warn

WINDOW = '"layer_types", "sliding_window" and "use_sliding_window": true at the top level of config.json'
ENDS = ("eos_token_id", "bos_token_id", "pad_token_id")
DEFAULT_THETA = 10_000.0  # of transformers' Qwen3Config, with which SGLang reads a draft's config


def suspicions(target: Checkpoint, draft: Checkpoint, card: Card, config: DraftConfig) -> Iterator[Finding]:
    yield from _mask(target, config)
    yield from _taps(target, draft, config)
    yield from _causal(draft, config)
    yield from _window(draft, config)
    yield from _theta(target, draft)
    yield from _other_target(target, draft, card)


def _mask(target: Checkpoint, config: DraftConfig) -> Iterator[Finding]:
    tokenizer = target.tokenizer()
    if tokenizer is None:
        said = "the target has no tokenizer.json that can be read, so the mask token was not looked up."
        yield warn("tokenizer", said, "save the tokenizer in its fast form, which writes tokenizer.json")
        return
    mask = config.mask_token_id
    assert mask is not None
    if mask >= target.text.get("vocab_size", mask + 1):
        return  # said where draft and target are compared
    text, added = tokenizer.id_to_token(mask), tokenizer.get_added_tokens_decoder()
    said_ends = [one.get(key) for one in (target.text, target.json("generation_config.json")) for key in ENDS]
    ends = {one for said in said_ends for one in (said if isinstance(said, list) else [said])}
    fix = "write the mask_token_id of the published config.json"
    if text is not None and mask not in added:
        said = (
            f"mask_token_id {mask} is {text!r}, a token of ordinary text; a draft is trained with one that no text has."
        )
        yield warn("mask", said, fix, "mask")
    elif mask in ends:
        said = (
            f"mask_token_id {mask} is {text!r}, which begins, ends or pads a text; drafts mostly have one of their own."
        )
        yield warn("mask", said, fix, "mask")
    else:
        yield ok(
            "mask", f"mask_token_id {mask} is {text!r}." if text else f"mask_token_id {mask} is an id without text."
        )


def _taps(target: Checkpoint, draft: Checkpoint, config: DraftConfig) -> Iterator[Finding]:
    layers = target.text.get("num_hidden_layers")
    said_layers = (draft.config.get("dflash_config") or {}).get(
        "num_target_layers", draft.config.get("num_target_layers")
    )
    if isinstance(said_layers, int) and isinstance(layers, int) and said_layers != layers:
        said = f"the draft is for a target of {said_layers} layers (num_target_layers), and this one has {layers}."
        yield warn("taps", said, "take the draft that was trained for this target", "target")
        return
    taps = config.target_layer_ids
    usual = build_target_layer_ids(layers, len(taps)) if isinstance(layers, int) else taps
    if taps != usual:
        said = f"target_layer_ids are {list(taps)}; the published formula gives {list(usual)} for {layers} layers."
        yield ok("taps", said, "taps")


def _causal(draft: Checkpoint, config: DraftConfig) -> Iterator[Finding]:
    said_causal = draft.config.get("is_causal")
    usual = tuple(one.window is not None for one in config.attention)
    if config.layout == ZLAB and said_causal is not None and tuple(one.causal for one in config.attention) != usual:
        kind = "causal" if said_causal else "bidirectional"
        said = f"is_causal makes the block {kind}; without the key full layers are bidirectional and windows causal."
        yield warn("causality", said, "remove is_causal, if the published config.json does not have it", "causal")


def _window(draft: Checkpoint, config: DraftConfig) -> Iterator[Finding]:
    size, used = draft.config.get("sliding_window"), sorted({one.window for one in config.attention if one.window})
    if used:
        layers = sum(one.window is not None for one in config.attention)
        said = f"{layers} of {config.num_layers} layers see a window of {', '.join(map(str, used))} tokens."
        yield ok("window", said, "window")
    elif isinstance(size, int):
        said = f"sliding_window is {size}, but no layer has it: layer_types and use_sliding_window leave it out."
        yield warn("window", said, f"if the draft was trained with a window, write {WINDOW}", "window")


def _theta(target: Checkpoint, draft: Checkpoint) -> Iterator[Finding]:
    theirs, own = target.rope_theta, draft.rope_theta
    if theirs is None:
        return
    own = DEFAULT_THETA if own is None else own
    if own != theirs:
        said = f"the draft's rope_theta is {own:g} and the target's {theirs:g}; drafts mostly have their target's."
        yield warn("rope theta", said, "write the rope_theta of the published config.json, at each place", "theta")
    outer, nested = draft.config.get("rope_theta"), (draft.config.get("rope_parameters") or {}).get("rope_theta")
    if outer is not None and nested is not None and outer != nested:
        said = f"the draft has two: rope_theta {outer:g}, and {nested:g} in rope_parameters, which wins."
        yield warn("rope theta", said, "write the same number at both places", "theta")


def _other_target(target: Checkpoint, draft: Checkpoint, card: Card) -> Iterator[Finding]:
    base, own = PurePath(card.base_model).name.casefold(), PurePath(target.name).name.casefold()
    if base and base != own:
        said = f"the draft's card names {card.base_model} as its target, and this one is called {target.name}."
        fix = "if they differ in training, take a draft for this target, or train one (sglang-dflash train)"
        # A folder may have any name; a name of the hub is a statement.
        yield ok("base model", said, "target") if target.here else warn("base model", said, fix, "target")
    if target.config.get("quantization_config"):
        said = "the target is quantised; a draft that was trained for the plain weights loses a little."
        yield ok("quantised target", said, "target")
    first, second = target.tokenizer(), draft.tokenizer()
    if first is not None and second is not None and first.get_vocab() != second.get_vocab():
        said = "the draft's folder has a tokenizer of its own, which differs from the target's."
        yield warn("tokenizer", said, "take the draft that was trained for this target", "target")

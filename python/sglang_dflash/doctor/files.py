"""Examines the files of a target and its draft: configs, tokenizer, chat template, headers of the weights, the card.

No weight is read, and SGLang is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_dflash.core.draft_config import DraftConfig
from sglang_dflash.core.draft_weights import check_weights
from sglang_dflash.doctor.card import Card, read_card
from sglang_dflash.doctor.checkpoints import Checkpoint, open_checkpoint, read_draft
from sglang_dflash.doctor.findings import Finding, fail, ok, skip, warn
from sglang_dflash.doctor.suspicions import suspicions

OTHER_FILES = "download the draft again, config.json and weights of one revision"
OTHER_DRAFT = "take the draft that was trained for this target, with its config.json as published"

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of a weight


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, its draft, and the draft's card."""

    target: Checkpoint
    draft: Checkpoint
    card: Card


def open_pair(target: str, draft: str) -> Pair:
    """
    Args:
        target, draft: folders or hub names.

    Raises:
        ValueError: one of them cannot be opened; the message names the flag.
    """
    opened = open_checkpoint(draft, "--draft")
    return Pair(open_checkpoint(target, "--model-path"), opened, read_card(opened.folder))


def examine(pair: Pair) -> list[Finding]:
    """Everything that the files tell, faults first."""
    found = [*_target(pair)]
    try:
        draft, config = read_draft(pair.draft)
        pair, config = replace(pair, draft=draft), _with_mask_id(pair.target, config)
    except ValueError as error:
        found.append(fail("draft config", str(error), OTHER_DRAFT))
    else:
        found.append(ok("draft config", _described(config)))
        for part in (_fit, _weights, _context):
            found += part(pair, config)
        found += suspicions(pair.target, pair.draft, pair.card, config)
    found += _chat_template(pair.target)
    found += _card(pair.card)
    return found


def _target(pair: Pair) -> Iterator[Finding]:
    text = pair.target.text
    missing = [key for key in ("num_hidden_layers", "hidden_size", "vocab_size") if type(text.get(key)) is not int]
    if missing:
        yield fail("target", f"its config.json has no {', '.join(missing)}.", "download the target again")
        return
    shape = f"{text['num_hidden_layers']} layers, hidden size {text['hidden_size']}, {text['vocab_size']} token ids"
    names = pair.target.config.get("architectures") or ["a model without a class"]
    yield ok("target", f"{names[0]} of {shape}.")


def _with_mask_id(target: Checkpoint, config: DraftConfig) -> DraftConfig:
    """
    Raises:
        ValueError: the target's tokenizer lacks the mask token that the config names.
    """
    if config.mask_token_id is not None:
        return config
    tokenizer = target.tokenizer()
    token_id = None if tokenizer is None else tokenizer.token_to_id(config.mask_token or "")
    if token_id is None:
        raise ValueError(f"dflash_config.mask_token {config.mask_token!r} is not in the target's tokenizer.")
    return replace(config, mask_token_id=token_id)


def _described(config: DraftConfig) -> str:
    seen = {(one.causal, one.window) for one in config.attention}
    parts = []
    for causal, window in sorted(seen, key=str):
        kind = "causal" if causal else "bidirectional"
        parts.append(kind if window is None else f"{kind} in a window of {window}")
    return (
        f"the layout of {config.layout}: {config.num_layers} layers, block size {config.block_size}, "
        f"target layers {list(config.target_layer_ids)}, "
        f"mask token {config.mask_token_id}, {' and '.join(parts)} attention."
    )


def _fit(pair: Pair, config: DraftConfig) -> Iterator[Finding]:
    text = pair.target.text
    try:
        config.check_target(text["num_hidden_layers"], text["hidden_size"], text["vocab_size"])
    except KeyError:
        return  # said of the target
    except ValueError as error:
        yield fail("draft and target", str(error), OTHER_DRAFT)


def _weights(pair: Pair, config: DraftConfig) -> Iterator[Finding]:
    try:
        shapes = pair.draft.shapes()
        if shapes is None:
            yield skip("draft weights", "they are not in the safetensors format, so their headers say nothing.")
            return
        unread = check_weights(shapes, config)
    except ValueError as error:
        yield fail("draft weights", str(error), OTHER_FILES)
        return
    if unread:
        said = f"the weights hold {', '.join(unread)}, which nothing reads; num_hidden_layers is {config.num_layers}."
        yield warn("draft weights", said, OTHER_FILES, "weights")
    else:
        yield ok("draft weights", f"{len(shapes)} tensors have the shapes that config.json asks for.")


def _context(pair: Pair, config: DraftConfig) -> Iterator[Finding]:
    own, target = (one.text.get("max_position_embeddings") for one in (pair.draft, pair.target))
    if isinstance(own, int) and isinstance(target, int) and own < target:
        yield fail(
            "context",
            f"the draft's max_position_embeddings is {own} and the target's {target}: SGLang refuses the draft.",
            f"serve with --context-length {own}; or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, if the draft can "
            "do longer contexts",
        )


def _chat_template(target: Checkpoint) -> Iterator[Finding]:
    template = target.chat_template()
    if template is None:
        said = "the target has no chat template, so chats are refused; drafts are mostly trained on chats."
        yield warn("chat template", said, "take the target's instruct version, or give --chat-template")
        return
    switch = thinking_switch(template)
    if switch:
        said = (
            f"it has a thinking mode ({switch}): a draft that was trained without it does badly with it, or vice versa."
        )
        yield ok("chat template", said, "thinking")
    else:
        yield ok("chat template", "it has no switch for a thinking mode.")


def thinking_switch(template: str) -> str:
    """The variable that turns thinking on and off in this chat template; "" if there is none."""
    return next((name for name in ("enable_thinking", "thinking_budget", "thinking") if name in template), "")


def _card(card: Card) -> Iterator[Finding]:
    if card.taus:
        yield ok("card", "held-out tau by kind: " + ", ".join(f"{kind} {tau:.2f}" for kind, tau in card.taus.items()))
    else:
        yield skip(
            "card",
            "the draft's README has no tau in its YAML head, so nothing says what tau should be.",
            "give --expect-tau X with the number that its authors report",
        )


def weight_bytes(pair: Pair, dtype: str) -> int | None:
    """Bytes of both models' weights in that dtype; None where they are not in folders here, or are quantised."""
    total = 0.0
    for one in (pair.target, pair.draft):
        files = list(one.folder.glob("*.safetensors")) if one.here else []
        if not files or one.config.get("quantization_config"):
            return None
        stored = one.text.get("dtype") or one.text.get("torch_dtype") or dtype
        total += sum(file.stat().st_size for file in files) * BYTES.get(dtype, 2) / BYTES.get(stored, 2)
    return round(total)

"""Reads from a draft's config what it has beyond a plain draft: DFlash2's convolutions and selector, Domino's GRU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# SGLang's class and its two aliases.
DFLASH2_ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")


class Convolution(NamedTuple):
    """The grouped convolutions around attention and MLP of every draft layer.

    Fields:
        taps: rows that one output reads: its own and the `taps - 1` before it in its block.
        group_size: channels that share the input's part of their kernels.
    """

    taps: int
    group_size: int


class Selector(NamedTuple):
    """The selector, which chooses each draft among its row's candidates, given the draft before it.

    Fields:
        rank: columns of the two tables of tokens.
        top_k: candidates per row.
        vocab_size: rows of the tables.
        multiplier: factor of the candidates' logits.
        softcap: c; a logit z becomes c * tanh(z / c). None: as it is.
    """

    rank: int
    top_k: int
    vocab_size: int
    multiplier: float
    softcap: float | None


class Domino(NamedTuple):
    """The projector, which corrects each row's logits by the drafts before it.

    Fields:
        gru_size: units of the GRU over the drafts.
        rank: of the correction.
        vocab_size: columns of the correction.
        shift_label: whether row k drafts the token after its own position. Otherwise it drafts its own, as elsewhere.
    """

    gru_size: int
    rank: int
    vocab_size: int
    shift_label: bool


def read_convolution(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> Convolution | None:
    """The draft's convolutions, None if it has none.

    Args:
        config: the whole `config.json`; dflash: its `dflash_config`.

    Raises:
        ValueError: one sentence with the key, its value and what is allowed.
    """
    taps, group_size = _pair(config, dflash, "conv_kernel_size", "conv_group_size")
    if not taps:
        return None
    hidden_size = config.get("hidden_size")
    if type(hidden_size) is not int or hidden_size % group_size:
        raise ValueError(
            f"dflash_config.conv_group_size is {group_size} and the draft's hidden_size {hidden_size}: the former must "
            "divide the latter."
        )
    return Convolution(taps, group_size)


def read_selector(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> Selector | None:
    """The draft's selector; None if it has none. Arguments and errors as of `read_convolution`."""
    architectures = config.get("architectures")
    multiplier, softcap = _scores(dflash)
    rank, top_k = _pair(config, dflash, "selector_rank", "selector_top_k")
    needs = architectures is not None and architectures[0] in DFLASH2_ARCHITECTURES
    if needs != bool(rank):
        allowed = "a positive integer" if needs else "absent, because SGLang gives a selector to DFlash2's classes only"
        raise ValueError(f"dflash_config.selector_rank is {rank} in a draft of {architectures}; it must be {allowed}.")
    if not rank:
        return None
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < top_k:
        raise ValueError(
            f"The draft's config has vocab_size={vocab_size!r}; it must be an integer of at least selector_top_k, "
            f"{top_k}."
        )
    return Selector(rank, top_k, vocab_size, multiplier, softcap if softcap > 0 else None)


def read_domino(config: Mapping[str, Any], merged: Mapping[str, Any]) -> Domino | None:
    """The draft's projector; None if it has none. Errors as of `read_convolution`.

    Args:
        config: the whole `config.json`; merged: the same with the keys of its `dflash_config`, which win.
    """
    if merged.get("projector_type") != "domino":
        if merged.get("gru_hidden_dim"):
            raise ValueError(
                f"dflash_config.gru_hidden_dim is {merged['gru_hidden_dim']} and projector_type "
                f"{merged.get('projector_type')!r}; with Domino's projector it must be 'domino'."
            )
        return None
    if merged.get("selector_rank"):
        raise ValueError(
            f"dflash_config.projector_type is 'domino' and selector_rank {merged['selector_rank']}: a draft has one of "
            "them at most."
        )
    for key in ("gru_hidden_dim", "emb_dim", "vocab_size"):
        value = merged.get(key)
        if type(value) is not int or value < 1:
            raise ValueError(f"The draft's config has {key}={value!r}; for Domino it must be a positive integer.")
    if config.get("emb_dim") not in (None, merged["emb_dim"]):
        raise ValueError(
            f"The draft's emb_dim is {config['emb_dim']} and dflash_config.emb_dim {merged['emb_dim']}: they must be "
            "equal."
        )
    shift_label, prefix = merged.get("shift_label"), merged.get("pure_draft_prefix_len")
    if type(shift_label) is not bool:
        raise ValueError(f"dflash_config.shift_label is {shift_label!r}; it must be true or false.")
    if prefix != 1:
        raise ValueError(f"dflash_config.pure_draft_prefix_len is {prefix!r}; it must be 1.")
    return Domino(merged["gru_hidden_dim"], merged["emb_dim"], merged["vocab_size"], shift_label)


def _pair(config: Mapping[str, Any], dflash: Mapping[str, Any], first: str, second: str) -> tuple[int, int]:
    """Both values, or two zeros where the config has neither."""
    for key in (first, second):
        if config.get(key) and not dflash.get(key):
            raise ValueError(f"The draft's config has {key} at top level; SGLang reads it in dflash_config only.")
    values = {key: dflash.get(key, 0) or 0 for key in (first, second)}
    for key, value in values.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"dflash_config.{key} is {value!r}; it must be an integer of 0 or more.")
    if bool(values[first]) != bool(values[second]):
        raise ValueError(
            f"dflash_config.{first} is {values[first]} and dflash_config.{second} is {values[second]}: both must be "
            "positive, or neither given."
        )
    return values[first], values[second]


def _scores(dflash: Mapping[str, Any]) -> tuple[float, float]:
    """The factor and the bound of a selector's scores. SGLang reads both in every draft, and a null only as bound."""
    multiplier = _number(dflash, "output_multiplier", 1.0)
    if multiplier <= 0 or dflash.get("output_multiplier", 1.0) is None:
        raise ValueError(
            f"dflash_config.output_multiplier is {dflash['output_multiplier']}; it must be a number above 0, or absent."
        )
    return multiplier, _number(dflash, "final_logit_softcapping", 0.0)


def _number(dflash: Mapping[str, Any], key: str, default: float) -> float:
    value = dflash.get(key)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise ValueError(f"dflash_config.{key} is {value!r}; it must be a number.")
    return float(value)

"""Reads a draft's card: the YAML head of its README, where `sglang-dflash train` writes tau by kind of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

METRIC = "tau"


@dataclass(frozen=True, slots=True)
class Card:
    """
    Fields:
        taus: kind of held-out text -> tau; empty if the card has none.
        base_model: the target that the draft was trained for; "" if the card does not say.
    """

    taus: Mapping[str, float] = field(default_factory=dict)
    base_model: str = ""


def read_card(folder: Path) -> Card:
    """An empty card where there is no README, or its head cannot be read."""
    path = folder / "README.md"
    if not path.is_file():
        return Card()
    from huggingface_hub import ModelCard

    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data
    except Exception:  # of the YAML reader: a card is for people, and may hold anything
        return Card()
    taus = {}
    for result in data.eval_results or []:
        if result.metric_type == METRIC and isinstance(result.metric_value, int | float):
            taus[result.dataset_name] = float(result.metric_value)
    base = data.base_model
    return Card(taus, base if isinstance(base, str) else "")

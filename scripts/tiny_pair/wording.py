"""Shared vocabulary of the three data generators: the example record, word lists and a wording expander."""

import random
import re
from dataclasses import dataclass

_CHOICE = re.compile(r"\[([^\[\]]*)\]")

NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "June", "Kofi", "Lena", "Milo",
    "Nora", "Omar", "Pia", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Vera", "Wim", "Yara", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "pears", "books", "coins", "cards", "shells", "stamps", "marbles", "pencils", "cookies",
    "stickers", "beads", "tickets", "eggs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt and its answer; `key` names the combination of values behind them."""

    kind: str
    prompt: str
    answer: str
    key: str


def vary(rng: random.Random, text: str) -> str:
    """Replace every `[a|b|c]` in `text`, innermost first, by one of its choices."""
    while True:
        text, count = _CHOICE.subn(lambda m: rng.choice(m.group(1).split("|")), text)
        if not count:
            return text

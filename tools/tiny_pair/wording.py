"""Shared vocabulary of the three data generators: the example record, word lists and two wording expanders."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_RANK = 8
_SHARPNESS = 0.9
_RECENT = (1.0, 0.7)

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
    """Replaces every `[a|b|c]` in `text`, innermost first, with one of its choices."""
    while True:
        text, count = _CHOICE.subn(lambda m: rng.choice(m.group(1).split("|")), text)
        if not count:
            return text


@cache
def _vector(role: str, word: str) -> tuple[float, ...]:
    rng = random.Random(f"{role}/{word}")
    return tuple(rng.gauss(0, 1) for _ in range(_RANK))


@cache
def _pull(role: str, cue: str, word: str) -> float:
    """How strongly `cue` favours `word`: fixed, about standard normal, of low rank and therefore learnable."""
    pairs = zip(_vector(f"cue {role}", cue), _vector("word", word), strict=True)
    return sum(a * b for a, b in pairs) / math.sqrt(_RANK)


class Teller:
    """Draws wordings; each depends on the earlier draws and on the question's words.

    No choice is certain (the likeliest of eight has about 40 %), and the last two choices decide which one is
    likeliest. A model that reads one token at a time sees them. A draft that proposes a whole block at once would
    first have to work out the chain of choices, so chat is hard for it.
    """

    def __init__(self, rng: random.Random, cues: Sequence[str]) -> None:
        self.rng = rng
        self.cues = [(f"asked {i}", cue) for i, cue in enumerate(cues)]
        self.recent: list[str] = []

    def pick(self, options: Sequence[str]) -> str:
        """Draws one of `options` and remembers it as the latest choice."""
        weights = []
        for option in options:
            score = sum(0.7 * _pull(role, cue, option) for role, cue in self.cues)
            for i, (share, cue) in enumerate(zip(_RECENT, self.recent[::-1], strict=False)):
                score += share * _pull(f"recent {i}", cue, option)
            weights.append(math.exp(_SHARPNESS * score))
        chosen = self.rng.choices(options, weights)[0]
        if chosen:
            self.recent = [*self.recent[-1:], chosen]
        return chosen

    def tell(self, text: str) -> str:
        """Replaces every `[a|b|c]` in `text`, from left to right; choices must not nest."""
        return _CHOICE.sub(lambda m: self.pick(m.group(1).split("|")), text)

"""Tokens in the groups in which steps may bring them."""

from __future__ import annotations

import random
from typing import TypeVar

Token = TypeVar("Token")


def random_groups(tokens: list[Token], seed: str, count: int) -> list[list[list[Token]]]:
    """`count` times the tokens, each time in other groups of 1 to 16; the same for the same seed."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        left, groups = list(tokens), []
        while left:
            size = chance.randint(1, 16)
            groups.append(left[:size])
            left = left[size:]
        found.append(groups)
    return found
